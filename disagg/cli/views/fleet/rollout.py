"""How a rollout ended: one row per host, then why it was stopped."""

from __future__ import annotations

from collections.abc import Collection

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.views.errors import error_views
from disagg.fleet.rollout.report import RolloutReport

_STYLE = {"rolled out": "green", "unchanged": "dim", "rolled back": "yellow", "left": "dim", "failed": "bold red"}
_ENDINGS = {
    "done": Text("all hosts run the new release", "green"),
    "unchanged": Text("all hosts ran it already", "dim"),
    "rolled back": Text("rolled back", "bold yellow"),
    "stopped": Text("stopped", "bold red"),
}


def rollout_view(report: RolloutReport, all_hosts: Collection[str] = ()) -> RenderableType:
    """A table, the failures with their hints, and the ending. `all_hosts`: the names of all hosts of the fleet."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("host", style="bold", overflow="fold")
    table.add_column("outcome")
    table.add_column("runs", style="dim")
    for one in report.hosts:
        table.add_row(one.host, Text(one.outcome, _STYLE[one.outcome]), one.release[:8] or "–")
    errors = error_views([(one.host, one.error) for one in report.hosts if one.error is not None], all_hosts)
    reason = [Text(f": {report.reason}")] if report.reason else []
    end = Text.assemble(_ENDINGS[report.ending], *reason)
    next_step = [Text("disagg rollout goes on, disagg rollout --undo goes back")] if report.ending == "stopped" else []
    return Group(table, *errors, Text(), end, *next_step)
