"""`disagg init`: write a hosts.toml to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
) -> None:
    """Write a commented hosts.toml to start from."""
    refuse_to_overwrite(path, force)
    if json_file is None:
        write(starter(), path, force)
        typer.echo(f"Wrote {path}. Put your machines' addresses in it.\n{NEXT}")
        return
    converted = from_json(read(json_file), str(json_file))
    write(converted.text, path, force)
    for note in converted.ignored:
        typer.echo(f"{json_file}: {note}", err=True)
    typer.echo(f"Wrote {path}. Look at the lines marked CHECK.\n{NEXT}")
