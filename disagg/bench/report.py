"""A result as one self-contained HTML page: verdict, notes, hosts, charts and tables, for light and dark screens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files

from disagg.bench.charts import Axis, Bar, ChartLine, Dot, Mark, axis, bar_chart, line_chart
from disagg.bench.result import SIMULATED, BenchResult, Cell
from disagg.bench.stats import LATENCIES, PART_NAMES, Figures
from disagg.bench.verdict import Series, about
from disagg.units import ms, tick

_DEFINITIONS = {
    "TTFT": "request sent → first token received by the client; its parts add up to it",
    "E2E": "request sent → last token received",
    "in tok/s": "prompt tokens / TTFT, per request: how fast a prompt is read, as its caller sees it",
    "split": "both machines compute a prompt, each some of the layers; disaggregated: the prefill machine all of them",
    "beside": "seconds per token of answers that the decode machine writes while a prompt is read / without one",
    "TPOT": "(E2E − TTFT) / (output tokens − 1), per request",
    "ITL": "every gap between tokens, pooled over requests",
    "hidden transfer": "sending KV while this prompt's prefill computed",
    "exposed transfer": "prefill waited for the link, and end of prefill compute → last KV byte accepted",
    "out tok/s": "output tokens / time of the mode's turns",
    "goodput": "requests per second that meet all stated limits",
    "speedup": "median E2E of this row's machine alone / median E2E of both machines, with its 95 % bootstrap interval",
    "J/request": "watts of the machines a mode occupies × time of its turns / requests completed",
}
_PART_WORDS = {
    "failed_attempts": "failed attempts",
    "loading": "loading the model",
    "exposed_transfer": "exposed transfer",
    "first_step": "first decode step",
    "client": "client program",
}


def page(result: BenchResult) -> str:
    """The whole HTML document."""
    css = files("disagg.bench").joinpath("report.css").read_text(encoding="utf-8")
    body = "".join((_head(result), _hero(result), _notes(result), _hosts(result), *_sections(result), _footer()))
    title = escape(f"disagg bench: {result.kind}{result.model} on {result.fleet}")
    marked = ' class="simulated"' if result.simulated else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{css}</style></head><body{marked}><main>{body}</main></body></html>\n"
    )


def _head(result: BenchResult) -> str:
    plan = result.plan
    facts = (
        f"{result.kind}{result.fleet} · {result.workload} · {plan.requests} requests per mode and point · "
        f"seed {plan.seed} · {result.date}"
    )
    title = f"{result.kind}{escape(result.model)}, on both machines and on one"
    return f'<h1>{title}</h1><p class="facts">{escape(facts)}</p>'


def _hero(result: BenchResult) -> str:
    """One box per family of points: the headline, then a line per machine and metric."""
    boxes = []
    for where, headline in result.verdict.headlines.items():
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in result.verdict.sentences(where))
        headline_text = escape(result.kind + headline.text)
        text = f'<h3>Verdict<small>{escape(where)}</small></h3><p class="headline">{headline_text}</p>'
        boxes.append(f'<div class="hero {headline.decision}">{text}<ul>{items}</ul></div>')
    return "".join(boxes) or '<div class="hero"><h3>Verdict</h3><p class="headline">Nothing was completed.</p></div>'


def _notes(result: BenchResult) -> str:
    notes = []
    if result.on_cpu:
        notes.append(("", f"CPU: {', '.join(result.on_cpu)} ran the model on a CPU. These are not figures of a GPU."))
    if result.simulated:
        machines = ", ".join(f"{host} as {machine}" for host, machine in result.simulated.items())
        notes.append(("", f"Simulated: {machines}. {SIMULATED}"))
    if result.stopped:
        notes.append(("", f"Stopped: {result.stopped_early}."))
    if result.left_out:
        notes.append(("", f"{result.left_out} requests of the trace are over the model's context and were left out."))
    if fallbacks := sum(cell.figures.fallbacks for cell in result.cells):
        notes.append(("bad", f"{fallbacks} requests fell back: without a hand-off, they do not count in the verdict."))
    for (mode, kind, message), count in result.failures.most_common(10):
        notes.append(("bad", f"{count} × {mode} failed: {kind}: {message}"))
    for kind, count in result.warmup_errors.items():
        notes.append(("bad", f"{count} warm-up requests failed: {kind}"))
    return "".join(f'<p class="note {css}">{escape(text)}</p>' for css, text in notes)


def _hosts(result: BenchResult) -> str:
    """A table of the measured hosts; "" if they are not known."""
    if not result.hosts:
        return ""
    rows = [
        (
            host.name,
            host.role,
            host.address,
            host.hardware or "not stated",
            "none: simulated" if host.simulated else host.backend,
            ", ".join(f"{name} {version}" for name, version in host.versions.items()),
        )
        for host in result.hosts
    ]
    heads = ("host", "role", "address", "hardware (hosts.toml)", "backend (reported)", "versions")
    head = "".join(f'<th class="text">{name}</th>' for name in heads)
    cells = ("".join(f'<td class="text">{escape(value)}</td>' for value in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    listed = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>Hosts<small>{escape(result.model)}</small></h2><div class="card scroll">{listed}</div>'


def _sections(result: BenchResult) -> list[str]:
    parts = []
    for where, cells in result.families.items():
        done = [cell for cell in cells if cell.figures.completed]
        if not done:
            continue
        series = [one for one in result.verdict.series if one.where == where]
        charts = [by_length(done, "ttft", series), by_length(done, "e2el", series)]
        parts.append(
            f'<h2>Latency by prompt length<small>{escape(where)}</small></h2><div class="grid">{"".join(charts)}</div>'
        )
    for mode, title in (("disaggregated", "What the hand-off costs"), ("split", "What the split costs")):
        handed = [cell for cell in result.cells if cell.mode == mode and cell.figures.completed]
        if handed:
            cards = waterfall(result, handed) + transfer(result, handed)
            parts.append(f'<h2>{title}</h2><div class="grid">{cards}</div>')
    parts.append(f'<h2>Throughput against latency</h2><div class="grid">{tradeoffs(result)}</div>')
    parts += [table(where, cells, result) for where, cells in result.families.items()]
    return parts


def _footer() -> str:
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in _DEFINITIONS.items())
    return f"<footer><h2>Words</h2><dl>{terms}</dl></footer>"


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
        Mark(one.crossover, f"{_marked(one)} {one.against} from ≈{about(one.crossover)}")
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


def _marked(one: Series) -> str:
    return "wins over" if one.mode == "disaggregated" else f"{one.mode} wins over"


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
        f"Where TTFT goes<small>{cells[0].mode}, means</small>",
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
    title = f"KV transfer, hidden and exposed<small>{cells[0].mode}, means</small>"
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


def table(where: str, cells: Sequence[Cell], result: BenchResult) -> str:
    """All figures, a row per point and mode, without columns that would be empty."""
    of_answers = [one for one in result.verdict.series if one.where == where and one.metric == "e2el"]
    series = {one.against: one for one in of_answers if one.mode == "disaggregated"}
    by_split = {one.against: one for one in of_answers if one.mode == "split"}
    columns = {
        "done": [f"{cell.figures.completed}/{cell.figures.completed + cell.figures.failed}" for cell in cells],
        **{head: [ms(latency(cell.figures)) for cell in cells] for head, latency in LATENCIES.items()},
        "in tok/s": [_rate(cell.figures.prompt_throughput) for cell in cells],
        "out tok/s": [f"{cell.figures.output_throughput:,.1f}" for cell in cells],
        "req/s": [f"{cell.figures.request_throughput:,.2f}" for cell in cells],
        "goodput": [f"{cell.figures.request_goodput:,.2f}" if result.limits else "" for cell in cells],
        "J/request": [_energy(cell.figures) for cell in cells],
        "beside": [f"{beside.slowdown:.2f}×" if (beside := cell.figures.beside) else "" for cell in cells],
        "speedup": [_against(series.get(cell.mode), cell) for cell in cells],
        "speedup by split": [_against(by_split.get(cell.mode), cell) for cell in cells],
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


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


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
