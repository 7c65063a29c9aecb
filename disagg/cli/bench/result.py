"""Progress of a benchmark, and its result: hosts, tables, failures, the verdict, and the formula of every figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from disagg.bench.result import SIMULATED, BenchResult, Cell
from disagg.bench.stats import LATENCIES, PART_NAMES, Figures
from disagg.cli.views.items import plain_table
from disagg.units import counted, estimate, ms, size

if TYPE_CHECKING:
    from disagg.bench import Mode
    from disagg.bench.load import RunMonitor
    from disagg.bench.plan import BenchPlan
    from disagg.bench.verdict import Series, SpeedupAtLength


MODE_STYLE = {
    "disaggregated": "bold green",
    "split": "bold yellow",
    "decode-alone": "blue",
    "prefill-alone": "magenta",
    "whole": "cyan",
}
_AGAINST = {
    "decode-alone": "decode\nalone",
    "prefill-alone": "prefill\nalone",
    "whole": "whole",
    "disaggregated": "hand-\noff",
}
_DECISION_STYLE = {"wins": "green", "loses": "red", "undecided": "yellow"}
_HEADERS = {
    "failed_attempts": "failed",
    "loading": "load-\ning",
    "prefill": "pre-\nfill",
    "exposed_transfer": "ex-\nposed",
    "ingest": "in-\ngest",
    "first_step": "first\nstep",
    "network": "net-\nwork",
    "tokenise": "toke-\nnise",
}
NOTES = """\
TTFT: sent → first token. E2E: sent → last token.
TPOT = (E2E - TTFT) / (output tokens - 1).
ITL: every gap between tokens, pooled.
out tok/s = output tokens / time of the mode's turns.
in tok/s = prompt tokens / TTFT, median.
speedup = median alone / median of both machines, then its 95 % bootstrap interval.
hidden: KV sent while prefill computed. exposed: the request waited for it."""
GOODPUT_NOTE = "goodput: requests per second that meet all limits."
BESIDE_NOTE = "beside: answers running on the decode machine; quiet: while no prompt was read. ITL max: of one of them."
ENERGY_NOTE = "J/request = watts of the mode's machines × time of its turns / requests done."


class _Line(Progress):
    """Progress bars that do not fill the last columns."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from map(_EndsEarly, super().get_renderables())


@dataclass(frozen=True, slots=True)
class _EndsEarly:
    """Keeps 3 columns free for the ^C that a terminal echoes: a line that wraps cannot be erased."""

    line: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.line, options.update_width(max(1, options.max_width - 3)))


@contextmanager
def live(monitor: RunMonitor, console: Console, simulated: bool = False) -> Iterator[None]:
    """Show the estimate, then progress during the block: a bar on a terminal, else a line per point."""
    prefix = "simulated: " if simulated else ""
    columns = (
        BarColumn(16),
        TaskProgressColumn(table_column=Column(no_wrap=True, min_width=4)),
        TextColumn("ETA", table_column=Column(no_wrap=True, min_width=3)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1)),
    )
    with _Line(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"{prefix}connecting")
        last = [""]

        def changed() -> None:
            failed = f"[red]{monitor.failures.total()} failed[/] · " if monitor.failures else ""
            progress.update(
                task,
                completed=monitor.work,
                total=monitor.total_work,
                description=failed + escape(prefix + monitor.doing),
            )
            point = monitor.doing.partition(" · ")[2]
            if not console.is_terminal and point != last[0]:
                last[0] = point
                console.print(f"{prefix}measuring {point} …", style="dim", soft_wrap=True)

        def estimated(plan: BenchPlan, seconds: float | None) -> None:
            console.print(f"{prefix}{_announcement(plan, seconds)}", style="dim", soft_wrap=True)

        monitor.changed, monitor.estimated = changed, estimated
        yield


def _announcement(plan: BenchPlan, seconds: float | None) -> str:
    """What will be measured and how long it will take: "measuring 132 requests (...): about 2 min"."""
    points, modes = (counted(len(plan.points), "point"), counted(len(plan.modes), "mode"))
    time = "no estimate: a first request failed" if seconds is None else f"about {estimate(seconds)}"
    return f"measuring {counted(plan.total, 'request')} ({points} × {modes}, with warm-up): {time}"


def result_view(result: BenchResult) -> RenderableType:
    """Hosts, tables and notes, then the verdict and the formulas."""
    parts: list[RenderableType] = [
        _heading(result, f"{result.model} on {result.fleet}", f"  {result.workload}, seed {result.plan.seed}"),
        *(Text(host.text, "dim") for host in result.hosts),
        *([Text(SIMULATED, "dim")] if result.simulated else []),
        Text(),
    ]
    for where, cells in result.families.items():
        parts += [_heading(result, where), latency_table(cells), Text()]
        if extra := goodput_table(cells, bool(result.limits)):
            parts += [extra, Text()]
        if beside := beside_table(cells):
            title = f"what a prompt costs {counted(result.plan.beside, 'running answer')}"
            parts += [_heading(result, title), beside, Text()]
        for mode in ("disaggregated", "split"):
            parts += _where_ttft_went(result, [cell for cell in cells if cell.mode == mode])
        parts += _speedups(result, where)
    parts += [*_notes(result), _verdict(result), _footnote(result)]
    return Group(*parts)


def _heading(result: BenchResult, text: str, rest: str = "") -> Text:
    return Text.assemble((result.kind, "yellow"), (text, "bold"), rest)


def latency_table(cells: Sequence[Cell]) -> Table:
    """One row per prompt length and mode, without columns that would be empty."""
    columns = {
        head.replace(" ", "\n"): [ms(latency(cell.figures)) for cell in cells]
        for head, latency in LATENCIES.items()
        if head not in ("TTFT p99", "E2E p99")
    }
    columns = {head: values for head, values in columns.items() if any(value != "–" for value in values)}
    table = _table("prompt", "mode", "done", *columns, "in\ntok/s", "out\ntok/s")
    for number, cell in enumerate(cells):
        figures = cell.figures
        table.add_row(
            _length(cell) if cell is next(other for other in cells if other.point == cell.point) else "",
            Text(cell.mode, MODE_STYLE[cell.mode]),
            _done(figures),
            *(values[number] for values in columns.values()),
            "–" if figures.prompt_throughput is None else f"{figures.prompt_throughput:,.0f}",
            f"{figures.output_throughput:,.0f}" if figures.completed else "–",
            end_section=cell is [other for other in cells if other.point == cell.point][-1],
        )
    return table


def goodput_table(cells: Sequence[Cell], limits: bool) -> Table | None:
    """Requests per second, goodput if limits are stated, energy if power is known; None without both."""
    energy = any(cell.figures.joules_per_request is not None for cell in cells)
    if not limits and not energy:
        return None
    table = _table(
        "prompt", "mode", "req/s", *(["goodput"] if limits else []), *(["J/request", "power"] if energy else [])
    )
    for cell in cells:
        figures = cell.figures
        joules = figures.joules_per_request
        table.add_row(
            _length(cell) if cell is next(other for other in cells if other.point == cell.point) else "",
            Text(cell.mode, MODE_STYLE[cell.mode]),
            f"{figures.request_throughput:.2f}",
            *([f"{figures.request_goodput:.2f}"] if limits else []),
            *(["–" if joules is None else f"{joules:,.1f}", figures.energy_source or "–"] if energy else []),
        )
    return table


def beside_table(cells: Sequence[Cell]) -> Table | None:
    """What reading a prompt costs the answers that the decode machine writes meanwhile; None without such answers."""
    if not any(cell.figures.beside for cell in cells):
        return None
    table = _table("prompt", "mode", "TPOT\nquiet", "TPOT\nbeside", "slower", "ITL\nmax")
    for cell in cells:
        figures = cell.figures.beside
        values = ["–"] * 4
        if figures is not None:
            times = (figures.quiet_s, figures.during_s, figures.longest_s)
            quiet, during, most = (ms(1e3 * seconds) for seconds in times)
            values = [quiet, during, f"{figures.slowdown - 1:+.1%}", most]
        first = cell is next(other for other in cells if other.point == cell.point)
        table.add_row(_length(cell) if first else "", Text(cell.mode, MODE_STYLE[cell.mode]), *values)
    return table


def _where_ttft_went(result: BenchResult, family: Sequence[Cell]) -> list[RenderableType]:
    """family: of one mode."""
    cells = [cell for cell in family if cell.figures.completed]
    if not cells:
        return []
    means = [cell.figures.mean_ttft_parts_ms for cell in cells]
    names = [name for name in PART_NAMES if any(parts[name] for parts in means)]
    table = _table("prompt", "TTFT", *(_HEADERS.get(name, name) for name in names), "hid-\nden")
    for cell, parts in zip(cells, means, strict=True):
        hidden = Text(_bare_ms(cell.figures.mean_hidden_transfer_ms), "dim")
        ttft = _bare_ms(cell.figures.ttft.mean)
        table.add_row(_length(cell), ttft, *(_bare_ms(parts[name]) for name in names), hidden)
    title = _heading(result, f"{cells[0].mode}: where TTFT went (mean ms; parts add up, hidden is not one)")
    return [title, table, *(_handed_over(cell) for cell in cells), Text()]


def _handed_over(cell: Cell) -> Text:
    """KV sent, and prompt tokens that the decode machine computed nevertheless: 1 for a full hand-off."""
    figures = cell.figures
    moved = size(figures.total_kv_bytes / figures.completed)
    computed = figures.decode_computed_tokens / figures.completed
    quantised = figures.quantised_kv_requests
    form = f", int8 on the wire in {quantised} of {figures.completed}" if quantised else ""
    layers = f"{figures.mean_layers:.3g} layers on the prefill host, " if figures.mean_layers is not None else ""
    return Text(
        f"{_length(cell)} tokens: {layers}{moved} of KV per request{form}; decode computed {computed:,.3g} of them",
        "dim",
    )


def _speedups(result: BenchResult, where: str) -> list[RenderableType]:
    """A table of speedups: a row per prompt length, a column per machine and metric."""
    parts: list[RenderableType] = []
    for mode in ("disaggregated", "split"):
        parts += _speedups_of(result, mode, where)
    return parts


def _speedups_of(result: BenchResult, mode: Mode, where: str) -> list[RenderableType]:
    series = result.verdict.series
    columns = [one for one in series if one.where == where and one.mode == mode and one.comparisons]
    if not columns:
        return []
    names = {"e2el": "E2E", "ttft": "TTFT"}
    table = _table("prompt", *(f"{names[one.metric]}\n{_AGAINST[one.against]}" for one in columns))
    for length in sorted({comparison.prompt_tokens for one in columns for comparison in one.comparisons}):
        table.add_row(f"{length:,}", *(_speedup(one, length) for one in columns))
    over = "over one machine alone" if mode == "disaggregated" else "over the others"
    return [_heading(result, f"speedup of {mode} {over}"), table, Text()]


def _speedup(series: Series, length: int) -> Text:
    at_length: SpeedupAtLength | None = next((one for one in series.comparisons if one.prompt_tokens == length), None)
    if at_length is None:
        return Text("–", "dim")
    one = at_length.speedup
    return Text.assemble(
        (f"{one.value:.2f}x", f"bold {_DECISION_STYLE[at_length.decision]}"), (f" {one.low:.2f}–{one.high:.2f}", "dim")
    )


def _notes(result: BenchResult) -> list[RenderableType]:
    """What limits the meaning of the figures: CPU, stops, omissions, fallbacks, failures."""
    lines = []
    if result.on_cpu:
        lines.append(f"{', '.join(result.on_cpu)} ran the model on a CPU: these are not figures of a GPU")
    if result.stopped:
        lines.append(f"stopped: {result.stopped_early}")
    if result.left_out:
        lines.append(f"{result.left_out} requests of the trace are over the model's context and were left out")
    for cell in result.cells:
        if count := cell.figures.fallbacks:
            lines.append(f"{count} of {cell.point.label} fell back: without a hand-off, not in the verdict")
    for kind, count in result.warmup_errors.items():
        lines.append(f"{count} warm-up requests failed: {kind}")
    failures = [
        Text.assemble((f"{count} × {mode}: {kind} ", "bold red"), message)
        for (mode, kind, message), count in result.failures.most_common(10)
    ]
    notes: list[RenderableType] = [Text.assemble(("note: ", "bold yellow"), line) for line in lines]
    return [*notes, *failures, Text()] if notes or failures else []


def _verdict(result: BenchResult) -> RenderableType:
    lines: list[RenderableType] = []
    for where, headline in result.verdict.headlines.items():
        name = f"{where}: " if len(result.verdict.headlines) > 1 else ""
        lines.append(Text.assemble((name, "dim"), _heading(result, headline.text)))
        lines += [Text(f"· {sentence}") for sentence in result.verdict.sentences(where)]
    if not lines:
        lines.append(Text("No verdict: nothing was completed."))
    return Panel(Group(*lines), title="[bold]Verdict[/]", title_align="left", border_style="green")


def _footnote(result: BenchResult) -> Text:
    energy = any(cell.figures.joules_per_request is not None for cell in result.cells)
    extra = [*([GOODPUT_NOTE] if result.limits else []), *([BESIDE_NOTE] if result.plan.beside else [])]
    return Text("\n".join([NOTES, *extra, *([ENERGY_NOTE] if energy else [])]), "dim")


def _table(*names: str) -> Table:
    return plain_table(*names, right={*names} - {"mode", "power"}, whole=["mode"])


def _length(cell: Cell) -> str:
    length = cell.prompt_tokens
    return "–" if length is None else f"{length:,}"


def _done(figures: Figures) -> Text:
    total = figures.completed + figures.failed
    return Text(f"{figures.completed}/{total}", "red" if figures.failed else "")


def _bare_ms(value: float | None) -> str:
    """Milliseconds without the unit: 0.6, 42.0, 1,234; "–" if they were not measured."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"
