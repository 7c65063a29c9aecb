"""Servers coming up and going down: one line per change, and a table of how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Lock

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from disagg.cli.views.errors import error_view
from disagg.cli.views.logs import raw_line
from disagg.cli.views.units import seconds
from disagg.errors import DisaggError
from disagg.fleet.lifecycle import HostResult
from disagg.fleet.server import StartFailed

_STYLE = {
    **dict.fromkeys(("started", "restarted", "unchanged", "stopped"), "green"),
    **dict.fromkeys(("slow", "killed", "left"), "yellow"),
}


class Progress:
    """Prints a host's state each time it changes. `report` may be called from several threads."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = Lock()
        self._last: dict[str, str] = {}

    def report(self, host: str, doing: str) -> None:
        """Host `host` now is `doing`."""
        with self._lock:
            if self._last.get(host) != doing:
                self._last[host] = doing
                with suppress(OSError):  # a terminal that was closed must not keep servers from being stopped
                    self._console.print(Text.assemble((f"{host}: ", "bold"), (f"{doing} …", "dim")))


def results_view(results: Sequence[HostResult]) -> RenderableType:
    """One row per host, then each failure with the end of its log and its remedy."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("host", style="bold", overflow="fold")
    table.add_column("outcome")
    table.add_column("took", justify="right")
    for result in results:
        style = "red" if result.outcome == "failed" else _STYLE.get(result.outcome, "dim")
        took = seconds(result.seconds) if result.seconds else "–"
        table.add_row(result.host, Text(result.outcome, style), took)
    errors = [part for result in results if result.error is not None for part in _failure(result.host, result.error)]
    return Group(table, *errors)


def _failure(host: str, error: DisaggError) -> Iterator[RenderableType]:
    yield Text()
    if isinstance(error, StartFailed) and error.log:
        yield Text(f"the last {len(error.log)} lines of {host}'s log:", "dim")
        yield from (Padding(raw_line(line), (0, 0, 0, 2), expand=False) for line in error.log)
    yield error_view(error)
