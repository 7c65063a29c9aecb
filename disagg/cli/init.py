"""`disagg init`: write a hosts.toml to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg.cli.common.context import print_json
from disagg.cli.common.options import AsJson
from disagg.config.convert import from_json
from disagg.config.starter import refuse_to_overwrite, starter, write
from disagg.config.toml.reader import read

NEXT = "Then run: disagg trust, disagg deploy, disagg models pull, disagg start"


def init(
    path: Annotated[Path, typer.Option(help="The file to write.")] = Path("hosts.toml"),
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
    """Write a commented hosts.toml to start from."""
    refuse_to_overwrite(path, force)
    ignored: tuple[str, ...] = ()
    if json_file is None:
        write(starter(), path, force)
    else:
        converted = from_json(read(json_file), str(json_file))
        write(converted.text, path, force)
        ignored = tuple(f"{json_file}: {note}" for note in converted.ignored)
    if as_json:
        print_json({"path": str(path), "ignored": list(ignored)})
        return
    for note in ignored:
        typer.echo(note, err=True)
    look = "Put your machines' addresses in it." if json_file is None else "Look at the lines marked CHECK."
    typer.echo(f"Wrote {path}. {look}\n{NEXT}")
