"""`disagg init`: write a hosts.toml to start from."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import typer

from disagg.cli.common.context import confirm, print_json, settings, stdout
from disagg.cli.common.options import AsJson
from disagg.config.convert import from_json
from disagg.config.document import read
from disagg.config.hosts_file import CONFIG_VARIABLE, comes_with_disagg, default_hosts_file
from disagg.config.starter import refuse_to_overwrite, starter, write
from disagg.errors import UsageError

NEXT: Final = "Then run: disagg trust, disagg doctor, disagg deploy, disagg models pull, disagg start"
OFFERS: Final = (
    ("trust", "Show the hosts' SSH keys, to add them to known_hosts (disagg trust)?"),
    ("doctor", "Examine the hosts (disagg doctor)?"),
)
_OTHER_FILE: Final = Path("fleet.toml")


def init(
    context: typer.Context,
    *,
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="A prefill host, ADDRESS or USER@ADDRESS; repeatable.")
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="ADDRESS", help="A decode host, in the same way; repeatable.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--from-json",
            metavar="FILE",
            help='Convert a JSON file with "prefill_servers" and "decode_servers", each a list of objects with '
            '"host", "port", "model" and "name".',
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented hosts.toml to start from; at a terminal, offer to run `trust` and `doctor` with it.

    It writes the file that commands read: --config, else $DISAGG_CONFIG, else ./hosts.toml; but ./fleet.toml in place
    of a file that is part of disagg.
    """
    default = default_hosts_file()
    path = settings(context).config or (_OTHER_FILE if comes_with_disagg(default) else default)
    refuse_to_overwrite(path, force)
    ignored: tuple[str, ...] = ()
    if json_file is None:
        write(starter(prefill or (), decode or ()), path, force)
    elif prefill or decode:
        raise UsageError("--from-json names the hosts: --prefill and --decode do not go with it")
    else:
        converted = from_json(read(json_file), str(json_file))
        write(converted.text, path, force)
        ignored = tuple(f"{json_file}: {note}" for note in converted.ignored)
    if as_json:
        print_json({"path": str(path), "ignored": list(ignored)})
        return
    for note in ignored:
        typer.echo(note, err=True)
    given = prefill or decode
    if json_file is not None:
        look = "Look at the lines marked CHECK."
    else:
        look = "Its model and engines are examples." if given else "Put your machines' addresses in it."
    typer.echo(f"Wrote {path}. {look}")
    _say_how_it_is_read(path)
    typer.echo(NEXT)
    if given and sys.stdin.isatty() and stdout().is_terminal:
        _offer(context, path)


def _say_how_it_is_read(path: Path) -> None:
    """What makes other commands read the file, unless they do."""
    default = default_hosts_file()
    if default.resolve() == path.resolve():
        return
    if comes_with_disagg(default):
        typer.echo(f"{default} is part of disagg and stays as it is.")
    typer.echo(f"Commands read the new file after: export {CONFIG_VARIABLE}={shlex.quote(str(path.resolve()))}")


def _offer(context: typer.Context, path: Path) -> None:
    """Run the next commands that only look, one after the other, each if it is wanted and the one before went well."""
    root = context.find_root()
    root.obj = replace(settings(context), config=path)
    for name, question in OFFERS:
        if not confirm(question, stdout()):
            return
        command = root.command.get_command(root, name)  # type: ignore[attr-defined]  # of a group
        with command.make_context(name, [], parent=root) as own:
            try:
                command.invoke(own)
            except typer.Exit as end:
                if end.exit_code:
                    raise
