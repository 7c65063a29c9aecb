"""Deployments: the plan, live progress, and one table of how it ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from threading import Lock
from types import MappingProxyType, TracebackType

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from disagg.cli.views.errors import error_views
from disagg.cli.views.fleet.difference import difference_lines
from disagg.cli.views.fleet.together import host_names, host_options, together
from disagg.cli.views.items import Hanging
from disagg.errors import printable
from disagg.fleet.deploy.deployment import DeployResult
from disagg.fleet.deploy.steps import StepProgress
from disagg.fleet.lifecycle.status.comparison import UNFINISHED
from disagg.units import counted, seconds, size

_START = "disagg start --host "
LINE_EVERY_S = 10.0
"""Without a terminal, the least time between two lines of what one host's steps print."""
_STYLE = {"changed": "green", "unchanged": "dim", "planned": "cyan", "failed": "bold red"}


def plan_view(reports: Sequence[DeployResult], all_hosts: Collection[str] = ()) -> RenderableType:
    """Every host's steps, or why there are none. `all_hosts`: the names of all hosts of the fleet."""
    steps = [line for report in reports for line in _plan_lines(report)]
    return Group(*steps, *_errors(reports, all_hosts), Text(), _summary(reports))


def question(verb: str, changing: Sequence[DeployResult], hosts: int) -> str:
    """What is asked after the plan: `Deploy on 2 of 4 hosts (they download 5.2 GiB of packages)?`."""
    plans = [report.plan for report in changing if report.plan is not None]
    building = [plan for plan in plans if any(step.name == "environment" for step in plan.steps)]
    nbytes = sum(plan.package_bytes for plan in building)
    who = "it downloads" if len(changing) == 1 else "they download"
    download = f" ({who} {size(nbytes)} of packages)" if nbytes else ""
    return f"{verb} on {len(changing)} of {counted(hosts, 'host')}{download}?"


def _errors(reports: Sequence[DeployResult], all_hosts: Collection[str]) -> Iterator[RenderableType]:
    return error_views([(report.host, report.error) for report in reports if report.error is not None], all_hosts)


def _plan_lines(report: DeployResult) -> Iterator[RenderableType]:
    plan = report.plan
    release = f"  release {plan.release}" if plan is not None and plan.release else ""
    if report.error is not None:
        yield Text.assemble((report.host, "bold"), "  ", ("cannot be deployed", "bold red"))
        return
    steps = plan.steps if plan is not None else ()
    count = counted(len(steps), "step") if steps else "unchanged"
    yield Text.assemble((report.host, "bold"), f"  {count}", (release, "dim"))
    for number, step in enumerate(steps, 1):
        yield Hanging(Text(f"  {number:2} ", "dim"), Text(step.what))
    for note in plan.notes if plan else ():
        yield Hanging(Text("   ! ", "yellow"), Text(note))
    if plan is not None and plan.down:
        yield Hanging(Text("   ! ", "bold red"), Text(f"{plan.down}: disagg start --host {report.host}", "red"))
    if report.difference is not None:
        yield from difference_lines(report.difference)


def reports_view(
    reports: Sequence[DeployResult],
    all_hosts: Collection[str] = (),
    pulling: Collection[str] = (),
    words: Mapping[str, str] = MappingProxyType({}),
) -> RenderableType:
    """One row per host, then each failure with its last lines and its hint, then what to do next.

    `all_hosts`: the names of all hosts of the fleet. `pulling`: hosts whose models are pulled, not deployed. `words`:
    other words for results, as for uninstalling.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("host", style="bold", overflow="fold")
    table.add_column("result")
    table.add_column("release", style="dim")
    table.add_column("steps", justify="right")
    table.add_column("sent", justify="right")
    table.add_column("took", justify="right")
    for report in reports:
        table.add_row(*_row(report, words))
    summary = _summary(reports, words)
    return Group(table, *_errors(reports, all_hosts), Text(), summary, *_next(reports, all_hosts, pulling))


def _row(report: DeployResult, words: Mapping[str, str]) -> tuple[RenderableType, ...]:
    plan = report.plan
    changed = report.result == "changed"
    return (
        report.host,
        Text(words.get(report.result, report.result), _STYLE[report.result]),
        plan.release[:8] if plan is not None and report.ok else "",
        str(len(plan.steps)) if plan is not None and changed else "–",
        size(report.sent) if changed else "–",
        seconds(report.seconds),
    )


def _summary(reports: Sequence[DeployResult], words: Mapping[str, str] = MappingProxyType({})) -> Text:
    """`2 changed, 1 unchanged, 1 failed`."""
    counts: Counter[str] = Counter(report.result for report in reports)
    parts = [Text(f"{counts[one]} {words.get(one, one)}", style) for one, style in _STYLE.items() if counts[one]]
    return Text(", ").join(parts)


def _next(reports: Sequence[DeployResult], all_hosts: Collection[str], pulling: Collection[str]) -> Iterator[Text]:
    """What is down, though it should serve; then the command that starts serving what was deployed."""
    plans = [one.plan for one in reports if one.result in ("changed", "unchanged") and one.plan is not None]
    for shared in together([(plan.host, plan.down, _START + plan.host) for plan in plans if plan.down], all_hosts):
        who = f"{host_names(shared.hosts, all_hosts)}: {shared.cause}"
        yield Text.assemble(("down: ", "bold red"), (who, "red"), "\n  → ", (shared.hint, "bold cyan"))
    for needs in ("start", "restart"):
        waiting = [plan for plan in plans if plan.needs == needs and not plan.down]
        names = [plan.host for plan in waiting]
        if waiting:
            without_model = [name for name in names if name in pulling] if needs == "start" else []
            pull = f"disagg models pull{host_options(without_model, all_hosts)} && " if without_model else ""
            at_once = " --all-at-once" if any(plan.at_once for plan in waiting) and needs == "restart" else ""
            command = f"{pull}disagg {needs}{at_once}{host_options(names, all_hosts)}"
            yield Text.assemble(("next: ", "bold cyan"), command)


def rotation_view() -> RenderableType:
    """What is shown while a rotation of the token is not finished."""
    return Text.assemble(("token: ", "bold yellow"), UNFINISHED.why, "\n  → ", (UNFINISHED.hint, "bold cyan"))


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        """Without a terminal: every step, and of what it prints a line now and then."""
        return not event.line or self._clock() - self._printed.get(event.host, 0.0) >= LINE_EVERY_S

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A terminal writes "^C" where the cursor is; a full line would then be two, and one be left on the screen.
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.width = max(1, options.max_width - 3)
        grid.add_column(width=1)
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(style="dim", justify="right", no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        with self._lock:
            events = list(self._events.values())
        for event in events:
            line = Text(event.what)
            if event.line:
                line.append(f"  {printable(event.line.strip())}", "dim")
            grid.add_row(self._spinner, event.host, f"{event.number}/{event.total}", line)
        yield grid
