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

FIRST: Final[Mapping[str, str]] = {
    "demo": "Run a fleet on this machine, and show what it costs",
    "init": "Write a hosts.toml to start from",
    "deploy": "Bring this disagg, its environment and its settings to the hosts",
    "start": "Start the fleet's servers and wait until they are healthy",
    "status": "Show the health of every server",
    "generate": "Continue a prompt with one or several models",
    "chat": "Talk with a model in the terminal",
    "serve": "Serve the fleet to clients of the OpenAI API",
    "bench": "Compare the fleet with each of its machines alone",
    "doctor": "Check every host and measure the links that carry KV",
}
"""In the order of a first use."""
FURTHER: Final[Mapping[str, tuple[str, ...]]] = {
    "Prepare machines": ("trust", "bootstrap", "models", "token"),
    "Operate servers": ("stop", "restart", "logs", "ssh", "exec"),
    "Change releases": ("rollout", "rollback", "uninstall"),
    "Follow requests": ("keys", "history", "top", "verify"),
}
"""By what one wants to do."""
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
    """Where a command is below disagg.cli, as MODULE:NAME of a function or of a typer.Typer with subcommands."""

    path: str
    kind: type[Command] = Command


class _WordsCommand(Command):
    """A command that finds out itself what its arguments mean."""

    allow_extra_args = True


SOURCES: Final[Mapping[str, Source]] = {
    "demo": Source("demo:demo"),
    "init": Source("init:init"),
    "deploy": Source("fleet.deploy:deploy", HostCommand),
    "start": Source("fleet.lifecycle:start", HostCommand),
    "status": Source("fleet.status:status", HostCommand),
    "generate": Source("generate:generate", _WordsCommand),
    "chat": Source("chat.command:chat"),
    "serve": Source("gateway.serve:app"),
    "bench": Source("bench:app"),
    "doctor": Source("fleet.doctor:doctor", HostCommand),
    "trust": Source("fleet.trust:trust", HostCommand),
    "bootstrap": Source("fleet.bootstrap:bootstrap"),
    "models": Source("fleet.models:models"),
    "token": Source("fleet.token:token"),
    "stop": Source("fleet.lifecycle:stop", HostCommand),
    "restart": Source("fleet.lifecycle:restart", HostCommand),
    "logs": Source("fleet.logs:logs", HostCommand),
    "ssh": Source("fleet.remote:ssh"),
    "exec": Source("fleet.remote:exec_", HostCommand),
    "rollout": Source("fleet.rollout:rollout", HostCommand),
    "rollback": Source("fleet.deploy:rollback", HostCommand),
    "uninstall": Source("fleet.uninstall:uninstall", HostCommand),
    "keys": Source("gateway.keys:keys"),
    "history": Source("gateway.history:history"),
    "top": Source("gateway.top:top"),
    "verify": Source("verify:verify"),
}


class Program(CommandGroup):
    """The group of all commands."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.commands = _Commands(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, [*OTHER_WORDS.get(args[0], args[:1]), *args[1:]])

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Without importing any of them."""
        texts = {**FIRST, **{name: title for title, names in FURTHER.items() for name in names}}
        listed: list[Any] = [TyperCommand(name, help=text) for name, text in texts.items()]
        group = TyperGroup(commands=listed, params=self.params)
        return list(group.shell_complete(typer.Context(group), incomplete))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """A screen of 80 x 24, with the next prompt below it."""
        first, further = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
        for name, text in FIRST.items():
            first.add_row(Text(f"  {name}", _NAME), text)
        for title, names in FURTHER.items():
            further.add_row(f"  {title}", Text(", ").join(Text(name, _NAME) for name in names))
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
