"""What a machine needs before it is deployed to: what is in place, what is missing, and the commands for that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.views.items import Hanging
from disagg.errors import printable
from disagg.fleet.bootstrap import StepResult, StepState
from disagg.units import counted

_STYLE: Final[Mapping[StepState, str]] = {
    "in place": "dim",
    "missing": "yellow",
    "by hand": "yellow",
    "done": "green",
    "failed": "bold red",
}


def steps_view(results: Sequence[StepResult]) -> RenderableType:
    """One row for each step; then the commands of those that are missing, what is to be done by hand, and errors."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("step", style="bold", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("why", style="dim", overflow="fold")
    for one in results:
        table.add_row(one.step.name, Text(one.state, _STYLE[one.state]), Text(printable(one.found)), one.step.why)
    lines = [line for one in results for line in _more(one)]
    return Group(table, *([Text(), *lines] if lines else []))


def question(host: str, missing: Sequence[StepResult]) -> str:
    """`Run 2 steps on dgx-spark-1?`."""
    return f"Run {counted(len(missing), 'step')} on {host}?"


def _more(result: StepResult) -> Iterator[RenderableType]:
    step = result.step
    mark = Text(f"{step.name}: ", "bold")
    if result.state == "missing":
        yield Hanging(mark + Text("root $ " if step.root else "$ ", "dim"), Text(step.command))
    elif result.state == "by hand":
        yield Hanging(mark, Text(step.by_hand))
    elif result.state == "failed":
        yield Hanging(mark, Text(printable(result.error), "red"))
