"""Servers coming up and going down, and steps of a deployment, while they happen; a table of how servers ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from threading import Lock

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from disagg.cli.views.errors import error_views
from disagg.cli.views.items import plain_table
from disagg.cli.views.logs import raw_line
from disagg.errors import DisaggError, StartFailed, printable
from disagg.fleet.deploy.steps import StepProgress
from disagg.fleet.lifecycle.one_server import ServerResult
from disagg.units import counted, seconds

_STYLE = {
    **dict.fromkeys(("started", "restarted", "unchanged", "stopped"), "green"),
    **dict.fromkeys(("slow", "killed", "left"), "yellow"),
}


_USUAL = ("starting", "loading", "healthy", "stopping")
LINE_EVERY_S = 10.0
"""The least time between two lines of what one host's steps print, without a terminal."""


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
    table = plain_table("host", "outcome", "took", bold=["host"], fold=["host"], right=["took"], gap=0)
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


class DeployProgress:
    """Steps as they are carried out: a live table, or one line per step if stderr is no terminal.

    `report` may be called from several threads.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._lock = Lock()
        self._events: dict[str, StepProgress] = {}
        self._printed: dict[str, float] = {}
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(self, console=console, transient=True, refresh_per_second=10) if console.is_terminal else None

    def __enter__(self) -> DeployProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def report(self, event: StepProgress) -> None:
        """Show the event of a host; thread-safe."""
        with self._lock:
            self._events[event.host] = event
            if self._live is None and self._is_due(event):
                self._printed[event.host] = self._clock()
                where, what = f"[{event.number}/{event.total}]", printable(event.line.strip()) or event.what
                line = Text.assemble((f"{event.host}: ", "bold"), (f"{where} ", "dim"), what)
                self._console.print(line, soft_wrap=True)

    def _is_due(self, event: StepProgress) -> bool:
        """Whether to print this event without a terminal: every step, and of what a step prints a line now and then."""
        return not event.line or self._clock() - self._printed.get(event.host, 0.0) >= LINE_EVERY_S

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A terminal writes "^C" where the cursor is; a full line would then be two, and one be left on the screen.
        name, count = Column(style="bold", no_wrap=True), Column(style="dim", justify="right", no_wrap=True)
        grid = Table.grid(Column(width=1), name, count, Column(no_wrap=True, ratio=1), padding=(0, 1), expand=True)
        grid.width = max(1, options.max_width - 3)
        with self._lock:
            events = list(self._events.values())
        for event in events:
            line = Text(event.what)
            if event.line:
                line.append(f"  {printable(event.line.strip())}", "dim")
            grid.add_row(self._spinner, event.host, f"{event.number}/{event.total}", line)
        yield grid
