"""All figures of a result as HTML tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from disagg.bench.result import BenchResult, Cell
from disagg.bench.stats import Figures
from disagg.bench.units import ms
from disagg.bench.verdict import Series

_LATENCIES: Mapping[str, Callable[[Figures], float | None]] = {
    "TTFT p50": lambda figures: figures.ttft.median,
    "TTFT p99": lambda figures: figures.ttft.p99,
    "TPOT p50": lambda figures: figures.tpot.median,
    "ITL p99": lambda figures: figures.itl.p99,
    "E2E p50": lambda figures: figures.e2el.median,
    "E2E p99": lambda figures: figures.e2el.p99,
}


def table(where: str, cells: Sequence[Cell], result: BenchResult) -> str:
    """All figures, a row per point and mode, without columns that would be empty."""
    series = {one.against: one for one in result.verdict.series if one.where == where and one.metric == "e2el"}
    columns = {
        "done": [f"{cell.figures.completed}/{cell.figures.completed + cell.figures.failed}" for cell in cells],
        **{head: [ms(latency(cell.figures)) for cell in cells] for head, latency in _LATENCIES.items()},
        "out tok/s": [f"{cell.figures.output_throughput:,.1f}" for cell in cells],
        "req/s": [f"{cell.figures.request_throughput:,.2f}" for cell in cells],
        "goodput": [f"{cell.figures.request_goodput:,.2f}" if result.limits else "" for cell in cells],
        "J/request": [_energy(cell.figures) for cell in cells],
        "speedup": [_against(series.get(cell.mode), cell) for cell in cells],
    }
    columns = {head: values for head, values in columns.items() if any(value not in ("", "–") for value in values)}
    head = "".join(
        f'<th class="{"text" if name == "mode" else ""}">{name}</th>' for name in ("prompt", "mode", *columns)
    )
    rows = []
    for number, cell in enumerate(cells):
        first = number == 0 or cells[number - 1].point != cell.point
        length = f"{cell.prompt_tokens:,}" if first and cell.prompt_tokens else ""
        mode = f'<td class="text"><b class="{cell.mode}">{cell.mode}</b></td>'
        row = f"<td>{length}</td>{mode}" + "".join(f"<td>{values[number]}</td>" for values in columns.values())
        rows.append(f'<tr class="{"first" if first else ""}">{row}</tr>')
    figures = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<h2>All figures<small>{escape(where)}</small></h2><div class="card scroll">{figures}</div>'


def _energy(figures: Figures) -> str:
    joules = figures.joules_per_request
    return "–" if joules is None else f"{joules:,.1f} <small>{escape(figures.energy_source or '')}</small>"


def _against(series: Series | None, cell: Cell) -> str:
    """The speedup in whole answers over this row's machine alone; "" if there is none."""
    at_length = [one for one in series.comparisons if one.prompt_tokens == cell.prompt_tokens] if series else []
    if not at_length:
        return ""
    one = at_length[0].speedup
    return f'<span class="{at_length[0].decision}">{one.value:.2f}×</span> <small>{one.low:.2f}–{one.high:.2f}</small>'
