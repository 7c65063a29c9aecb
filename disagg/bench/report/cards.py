"""The charts of a result, each in a card with its title and legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from disagg.bench.report.charts import Axis, Bar, ChartLine, Dot, Mark, axis, bar_chart, line_chart
from disagg.bench.result import BenchResult, Cell
from disagg.bench.stats import PART_NAMES
from disagg.bench.units import ms, tick
from disagg.bench.verdict import Series, about

_PART_WORDS = {
    "failed_attempts": "failed attempts",
    "exposed_transfer": "exposed transfer",
    "first_step": "first decode step",
    "client": "client program",
}


def by_length(cells: Sequence[Cell], metric: str, series: Sequence[Series]) -> str:
    """Median and p90 of one metric over prompt lengths: a line per mode, marks at the crossovers."""
    lines = []
    for mode in dict.fromkeys(cell.mode for cell in cells):
        mine = sorted((cell for cell in cells if cell.mode == mode), key=lambda cell: cell.prompt_tokens or 0)
        lines.append(ChartLine(mode, [_length_dot(cell, metric) for cell in mine]))
    dots = [dot for line in lines for dot in line.dots]
    x = axis("prompt tokens", [dot.x for dot in dots], "{:,g}".format, "lengths")
    name = "TTFT" if metric == "ttft" else "E2E"
    y = axis(name, [value for dot in dots for value in (dot.y, dot.high or dot.y)], tick, "log")
    marks = [
        Mark(one.crossover, f"wins over {one.against} from ≈{about(one.crossover)}")
        for one in series
        if one.metric == metric and one.crossover is not None
    ]
    title = "Time to first token" if metric == "ttft" else "Time to the whole answer"
    return _card(
        f"{title}<small>{name}</small>",
        "Line: median. Band: up to p90.",
        _mode_legend(lines),
        line_chart(lines, x, y, marks),
    )


def _length_dot(cell: Cell, metric: str) -> Dot:
    spread = cell.figures.ttft if metric == "ttft" else cell.figures.e2el
    median, p90 = spread.median or 0.0, spread.p90
    tip = f"{cell.mode}, {cell.prompt_tokens:,} tokens: median {ms(median)}, p90 {ms(p90)}"
    return Dot(float(cell.prompt_tokens or 1), median, tip, high=p90)


def waterfall(result: BenchResult, cells: Sequence[Cell]) -> str:
    every = [cell.figures.mean_ttft_parts_ms for cell in cells]
    names = [name for name in PART_NAMES if any(parts[name] for parts in every)]
    bars = []
    for cell in cells:
        parts = cell.figures.mean_ttft_parts_ms
        segments = [(name, max(0.0, parts[name] or 0.0), f"{_word(name)}: {ms(parts[name])}") for name in names]
        bars.append(Bar(_bar_label(result, cell), segments, ms(cell.figures.ttft.mean)))
    legend = _legend([(name, _word(name)) for name in names])
    return _card(
        "Where TTFT goes<small>disaggregated, means</small>",
        "The parts add up to TTFT.",
        legend,
        bar_chart(bars, tick),
    )


def transfer(result: BenchResult, cells: Sequence[Cell]) -> str:
    bars = []
    for cell in cells:
        figures = cell.figures
        hidden, exposed = figures.mean_hidden_transfer_ms or 0.0, figures.mean_exposed_transfer_ms or 0.0
        share = f"{hidden / (hidden + exposed):.0%} hidden" if hidden + exposed > 0 else "–"
        kv = cell.figures.total_kv_bytes / cell.figures.completed / 1e6
        tip = f"{kv:,.2f} MB of KV per request"
        segments = [
            ("hidden", hidden, f"hidden: {ms(hidden)}, {tip}"),
            ("exposed_transfer", exposed, f"exposed: {ms(exposed)}, {tip}"),
        ]
        bars.append(Bar(_bar_label(result, cell), segments, share))
    legend = _legend([("hidden", "hidden behind prefill"), ("exposed_transfer", "exposed: waited for")])
    title = "KV transfer, hidden and exposed<small>disaggregated, means</small>"
    return _card(title, "Hidden time adds nothing to TTFT.", legend, bar_chart(bars, tick))


def tradeoffs(result: BenchResult) -> str:
    """One plot per prompt and output length that was measured at several loads; else one over prompt lengths."""
    done = [cell for cell in result.cells if cell.figures.completed]
    groups: dict[tuple[int | None, int | None], list[Cell]] = {}
    for cell in done:
        groups.setdefault((cell.point.prompt_tokens, cell.point.output_tokens), []).append(cell)
    swept = {key: cells for key, cells in groups.items() if len({cell.point.load for cell in cells}) > 1}
    if swept:
        named = {_group_name(key): cells for key, cells in swept.items()}
        return "".join(_tradeoff(name, cells, lambda cell: cell.point.load.short) for name, cells in named.items())
    return _tradeoff("", done, lambda cell: f"{cell.prompt_tokens:,}") if done else ""


def _tradeoff(name: str, cells: Sequence[Cell], label: Callable[[Cell], str]) -> str:
    lines = [
        ChartLine(mode, [_tradeoff_dot(cell, label(cell)) for cell in cells if cell.mode == mode])
        for mode in dict.fromkeys(cell.mode for cell in cells)
    ]
    dots = [dot for line in lines for dot in line.dots]
    x: Axis = axis("output tokens per second", [dot.x for dot in dots], "{:,g}".format, "linear")
    y = axis("median E2E", [dot.y for dot in dots], tick, "log")
    title = f"Median E2E by throughput<small>{escape(name)}</small>"
    return _card(
        title,
        "Right and down is better. " + ("c4: four at a time." if name else "Beside the dots: prompt tokens."),
        _mode_legend(lines),
        line_chart(lines, x, y),
    )


def _tradeoff_dot(cell: Cell, label: str) -> Dot:
    speed, latency = cell.figures.output_throughput, cell.figures.e2el.median or 0.0
    return Dot(speed, latency, f"{cell.mode}, {label}: {speed:,.1f} tok/s, median E2E {ms(latency)}", label=label)


def _card(title: str, note: str, legend: str, picture: str) -> str:
    return f'<section class="card"><h3>{title}</h3><p>{escape(note)}</p>{legend}{picture}</section>'


def _mode_legend(lines: Sequence[ChartLine]) -> str:
    return _legend([(line.css, line.css) for line in lines])


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    words = "".join(f'<span><i class="{css}"></i>{escape(word)}</span>' for css, word in entries)
    return f'<div class="legend">{words}</div>'


def _bar_label(result: BenchResult, cell: Cell) -> str:
    length = f"{cell.prompt_tokens:,}"
    return f"{length} · {cell.point.load.short}" if len(result.families) > 1 else f"{length} tokens"


def _group_name(key: tuple[int | None, int | None]) -> str:
    prompt, output = ("each item's own" if one is None else f"{one:,}" for one in key)
    return f"prompt {prompt}, output {output}"


def _word(part: str) -> str:
    return _PART_WORDS.get(part, part)
