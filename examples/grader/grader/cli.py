"""`grade ASSIGNMENT NOTEBOOK... --out results.csv`."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from grader import pipeline, report, rubric
from grader.errors import GraderError
from grader.models import Gateway
from grader.notebook import MAX_BYTES
from grader.pipeline import LAYERS, Pipeline
from grader.rubric import Assignment
from grader.store import Store

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
DEFAULT_GATEWAY = "http://127.0.0.1:8080/v1"


@app.command()
def grade(
    assignment: Annotated[Path, typer.Argument(help="Folder with rubric.toml and solution.ipynb.")],
    notebooks: Annotated[list[Path], typer.Argument(help="Notebooks of students.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="The table of points.")] = Path("results.csv"),
    gateway: Annotated[str, typer.Option(help="Address of the gateway, with /v1.", envvar="GRADER_GATEWAY")] = (
        DEFAULT_GATEWAY
    ),
    store: Annotated[Path | None, typer.Option(help="Keep the grades in this SQLite file, for the page.")] = None,
    batch: Annotated[str, typer.Option(help="Go on with this batch of the store: what it has graded is kept.")] = "",
) -> None:
    """Grade notebooks with the models of a gateway. Status 1 if one could not be graded."""
    try:
        loaded = rubric.load(assignment)
        kept = Store(store or ":memory:")
        name = batch or secrets.token_hex(4)
        for path in notebooks:
            kept.add(name, loaded.name, path.name, bounded(path))
        kept.requeue(name, ("running", "failed"))
        failed = asyncio.run(run(kept, loaded, name, gateway))
        out.write_text(report.table(kept, name, loaded.rubric), "utf-8")
    except (GraderError, OSError, sqlite3.Error) as error:
        raise SystemExit(f"grade: {error}") from error
    Console(stderr=True).print(f"{out}: {len(notebooks)} notebook{'s'[: len(notebooks) != 1]}, {failed} not graded")
    sys.exit(1 if failed else 0)


def bounded(path: Path) -> bytes:
    """The file, with one byte more than is allowed if it is too large: reading it as a notebook fails then."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def layer_bars(console: Console) -> Progress:
    """A layer's name, bar, count and time, whole on 80 columns, too; then the detail, as far as it fits."""
    columns = (
        TextColumn("{task.description:>11}", table_column=Column(min_width=11, no_wrap=True)),
        BarColumn(10),
        MofNCompleteColumn(table_column=Column(min_width=7, no_wrap=True)),
        TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
        TextColumn("{task.fields[detail]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    return Progress(*columns, console=console)


async def run(store: Store, assignment: Assignment, batch: str, url: str) -> int:
    """Grade what is queued, with a bar per layer. Returns the number of notebooks that failed."""
    total = len(store.batch(batch))
    with layer_bars(Console(stderr=True)) as bars:
        done = sum(one.state == "done" for one in store.batch(batch))
        names = (*LAYERS, None)
        tasks = {layer: bars.add_task(layer or "notebooks", total=total, completed=done, detail="") for layer in names}

        def observe(event: pipeline.Progress) -> None:
            hosts = [f"{one.model} on {one.hosts}" for one in event.runs]
            detail = f"{event.name} {event.detail} {'; '.join(dict.fromkeys(hosts))}"
            bars.update(tasks[event.layer], advance=int(event.state != "running"), detail=detail[:100])

        gateway = Gateway(url, os.environ.get("GRADER_KEY", "unused"))
        try:
            await gateway.check()
            await Pipeline(store, gateway, {assignment.name: assignment}, observe).drain(batch)
        finally:
            await gateway.close()
    failed = [one for one in store.batch(batch) if one.state == "failed"]
    for one in failed:
        Console(stderr=True).print(f"{one.name}: {one.error}", style="red", markup=False)
    return len(failed)


def main() -> None:
    app()
