"""`python -m grader.web`: the page on this machine, http://127.0.0.1:8090."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from grader import rubric
from grader.cli import DEFAULT_GATEWAY
from grader.errors import GraderError
from grader.models import Gateway
from grader.store import Store
from grader.web.app import create


def serve(
    assignments: Annotated[Path, typer.Option(help="Folder of assignments.")] = Path("assignments"),
    store: Annotated[Path, typer.Option(help="SQLite file of the grades.")] = Path("grades.db"),
    gateway: Annotated[str, typer.Option(help="With /v1.", envvar="GRADER_GATEWAY")] = DEFAULT_GATEWAY,
    port: Annotated[int, typer.Option(help="Of the page.")] = 8090,
) -> None:
    """Serve the page on this machine until Ctrl-C."""
    try:
        found = rubric.find(assignments)
        kept = Store(store)
    except (GraderError, OSError) as error:
        raise SystemExit(f"grader: {error}") from error
    app = create(kept, Gateway(gateway, os.environ.get("GRADER_KEY", "unused")), found)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(serve)
