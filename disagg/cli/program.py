"""The commands of `disagg` by name: each is imported when it is called, and the help of `disagg` lists them all on one
screen."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final, NamedTuple

import typer.main
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo, TyperInfo

from disagg.cli.common.context import stdout
from disagg.cli.common.hosts import HostCommand
from disagg.cli.common.options import Command, CommandGroup

_GOALS: Final = ("Prepare machines", "Operate servers", "Change releases", "Follow requests")
_PREPARE, _OPERATE, _RELEASE, _FOLLOW = _GOALS
OTHER_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "plan": ("deploy", "--dry-run"),
    "watch": ("status", "--notify"),
    "plan-capacity": ("bench", "predict"),
    "prune": ("uninstall", "--unused"),
    "gateway": ("serve",),
}
"""Commands that are not listed -> what they stand for."""
_OPTIONS: Final = """\
disagg COMMAND --help shows its options. Every command has --config PATH (else
$DISAGG_CONFIG, else ./hosts.toml), -q or --quiet (results and errors only).
disagg has --version, --install-completion, --show-completion, -h or --help."""
_NAME: Final = "bold cyan"


class Source(NamedTuple):
    """Where a command is below disagg.cli, as MODULE:NAME of a function or of a typer.Typer with subcommands. about:
    its line in the help of `disagg`; of those that are listed by what one wants to do, that."""

    path: str
    about: str
    kind: type[Command] = Command


class _WordsCommand(Command):
    """A command that finds out itself what its arguments mean."""

    allow_extra_args = True


SOURCES: Final[Mapping[str, Source]] = {
    "demo": Source("demo:demo", "Run a fleet on this machine, and show what it costs"),
    "init": Source("init:init", "Write a hosts.toml to start from"),
    "deploy": Source(
        "fleet.deploy:deploy", "Bring this disagg, its environment and its settings to the hosts", HostCommand
    ),
    "start": Source("fleet.lifecycle:start", "Start the fleet's servers and wait until they are healthy", HostCommand),
    "status": Source("fleet.status:status", "Show the health of every server", HostCommand),
    "generate": Source("generate:generate", "Continue a prompt with one or several models", _WordsCommand),
    "chat": Source("chat.command:chat", "Talk with a model in the terminal"),
    "serve": Source("gateway.serve:app", "Serve the fleet to clients of the OpenAI API"),
    "bench": Source("bench:app", "Compare the fleet with each of its machines alone"),
    "doctor": Source("fleet.doctor:doctor", "Check every host and measure the links that carry KV", HostCommand),
    "trust": Source("fleet.trust:trust", _PREPARE, HostCommand),
    "bootstrap": Source("fleet.bootstrap:bootstrap", _PREPARE),
    "models": Source("fleet.models:models", _PREPARE),
    "token": Source("fleet.token:token", _PREPARE),
    "stop": Source("fleet.lifecycle:stop", _OPERATE, HostCommand),
    "restart": Source("fleet.lifecycle:restart", _OPERATE, HostCommand),
    "logs": Source("fleet.logs:logs", _OPERATE, HostCommand),
    "ssh": Source("fleet.remote:ssh", _OPERATE),
    "exec": Source("fleet.remote:exec_", _OPERATE, HostCommand),
    "rollout": Source("fleet.rollout:rollout", _RELEASE, HostCommand),
    "rollback": Source("fleet.deploy:rollback", _RELEASE, HostCommand),
    "uninstall": Source("fleet.uninstall:uninstall", _RELEASE, HostCommand),
    "keys": Source("gateway.keys:keys", _FOLLOW),
    "history": Source("gateway.history:history", _FOLLOW),
    "top": Source("gateway.top:top", _FOLLOW),
    "verify": Source("verify:verify", _FOLLOW),
}
"""First those that have a line of their own, in the order of a first use."""


class Program(CommandGroup):
    """The group of all commands."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.commands = _Commands(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args == ["gateway"]:  # a group whose only command was `endpoints`: alone it must start nothing
            args = [*args, "--help"]
        return super().resolve_command(ctx, [*OTHER_WORDS.get(args[0], args[:1]), *args[1:]])

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The commands that begin so, without importing any of them."""
        listed: list[Any] = [TyperCommand(name, help=source.about) for name, source in SOURCES.items()]
        group = TyperGroup(commands=listed, params=self.params)
        return list(group.shell_complete(typer.Context(group), incomplete))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """A screen of 80 x 24, with the next prompt below it."""
        first, further = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
        for name, source in SOURCES.items():
            if source.about not in _GOALS:
                first.add_row(Text(f"  {name}", _NAME), source.about)
        for goal in _GOALS:
            names = (Text(name, _NAME) for name, source in SOURCES.items() if source.about == goal)
            further.add_row(f"  {goal}", Text(", ").join(names))
        usage = Text.assemble(("Usage: ", "bold"), "disagg [OPTIONS] COMMAND [ARGS]...")
        for part in (usage, self.help or "", Text(), first, Text(), further, Text(), Text(_OPTIONS, "dim")):
            stdout().print(part)


class _Commands(MutableMapping[str, Any]):
    """Name -> command, built when it is first asked for."""

    def __init__(self, built: Mapping[str, Any]) -> None:
        self._built = dict(built)

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _build(name, SOURCES[name])
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._built[name] = command

    def __delitem__(self, name: str) -> None:
        del self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**SOURCES, **self._built})

    def __len__(self) -> int:
        return len({**SOURCES, **self._built})


def _build(name: str, source: Source) -> Any:
    module, _, attribute = source.path.partition(":")
    found = getattr(importlib.import_module(f"disagg.cli.{module}"), attribute)
    # "markdown" fills the paragraphs of help texts; otherwise they break where the source does.
    if isinstance(found, typer.Typer):
        return typer.main.get_group_from_info(
            TyperInfo(found), pretty_exceptions_short=True, suggest_commands=True, rich_markup_mode="markdown"
        )
    info = CommandInfo(name, cls=source.kind, callback=found)
    return typer.main.get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode="markdown")
