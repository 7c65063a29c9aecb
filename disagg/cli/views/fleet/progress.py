"""Servers coming up and going down: one line per change, and a table of how it ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from threading import Lock

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from disagg.cli.views.errors import error_views
from disagg.cli.views.fleet.logs import raw_line
from disagg.errors import DisaggError, StartFailed
from disagg.fleet.lifecycle.base import ServerResult
from disagg.units import counted, seconds

_STYLE = {
    **dict.fromkeys(("started", "restarted", "unchanged", "stopped"), "green"),
    **dict.fromkeys(("slow", "killed", "left"), "yellow"),
}


_USUAL = ("starting", "loading", "healthy", "stopping")


class HostProgress:
    """Prints a host's state each time it changes. `report` may be called from several threads. brief: each state that
    all hosts go through is printed once, for the first host that is in it, as one of the servers."""

    def __init__(self, console: Console, *, brief: bool = False) -> None:
        self._console, self._brief = console, brief
        self._lock = Lock()
        self._last: dict[str, str] = {}
        self._told: set[str] = set()  # states, as those of the servers

    def report(self, host: str, doing: str) -> None:
        """Host `host` now is `doing`."""
        with self._lock:
            if self._brief and doing in _USUAL:
                if doing == "healthy" or doing in self._told:  # no news of the others
                    return
                self._told.add(doing)
                host = "servers"
            elif self._last.get(host) == doing:
                return
            self._last[host] = doing
            end = "" if doing == "healthy" else " …"
            with suppress(OSError):  # a terminal that was closed must not keep servers from being stopped
                self._console.print(Text.assemble((f"{host}: ", "bold"), (f"{doing}{end}", "dim")))


def results_table(results: Sequence[ServerResult]) -> Table:
    """One row per host."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("host", style="bold", overflow="fold")
    table.add_column("outcome")
    table.add_column("took", justify="right")
    for result in results:
        style = "red" if result.outcome == "failed" else _STYLE.get(result.outcome, "dim")
        took = seconds(result.seconds) if result.seconds else "–"
        table.add_row(result.host, Text(result.outcome, style), took)
    return table


def failures_view(results: Sequence[ServerResult], all_hosts: Collection[str] = ()) -> RenderableType | None:
    """Each failure with the end of its log and its hint; None without one. `all_hosts`: all names of the fleet."""
    failed = [(result.host, result.error) for result in results if result.error is not None]
    silent = [one for one in failed if not _log(one[1])]
    logged = [part for host, error in failed if _log(error) for part in _with_log(host, error, all_hosts)]
    return Group(*logged, *error_views(silent, all_hosts)) if failed else None


def _log(error: DisaggError) -> Sequence[str]:
    return error.log if isinstance(error, StartFailed) else ()


def _with_log(host: str, error: DisaggError, all_hosts: Collection[str]) -> Iterator[RenderableType]:
    log = _log(error)
    yield Text()
    yield Text(f"the last {counted(len(log), 'line')} of {host}'s log:", "dim")
    yield from (Padding(raw_line(line), (0, 0, 0, 2), expand=False) for line in log)
    yield from list(error_views([(host, error)], all_hosts))[1:]
