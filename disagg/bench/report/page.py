"""The HTML page: verdict, notes, hosts, charts and tables, for light and dark screens."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from disagg.bench.report.cards import by_length, tradeoffs, transfer, waterfall
from disagg.bench.report.table import table
from disagg.bench.result import SIMULATED, BenchResult

_DEFINITIONS = {
    "TTFT": "request sent → first token received by the client; its parts add up to it",
    "E2E": "request sent → last token received",
    "TPOT": "(E2E − TTFT) / (output tokens − 1), per request",
    "ITL": "every gap between tokens, pooled over requests",
    "hidden transfer": "sending KV while this prompt's prefill computed",
    "exposed transfer": "prefill waited for the link, and end of prefill compute → last KV byte accepted",
    "out tok/s": "output tokens / time of the mode's turns",
    "goodput": "requests per second that meet all stated limits",
    "speedup": "median E2E of this row's machine alone / median E2E disaggregated, with its 95 % bootstrap interval",
    "J/request": "watts of the machines a mode occupies × time of its turns / requests completed",
}


def page(result: BenchResult) -> str:
    """The whole HTML document."""
    css = files("disagg.bench.report").joinpath("report.css").read_text(encoding="utf-8")
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
    title = f"{result.kind}{escape(result.model)}, disaggregated and on one machine"
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
        notes.append(("", f"Simulated: {result.simulated_text}. {SIMULATED}"))
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
    handed = [cell for cell in result.cells if cell.mode == "disaggregated" and cell.figures.completed]
    if handed:
        cards = waterfall(result, handed) + transfer(result, handed)
        parts.append(f'<h2>What the hand-off costs</h2><div class="grid">{cards}</div>')
    parts.append(f'<h2>Throughput against latency</h2><div class="grid">{tradeoffs(result)}</div>')
    parts += [table(where, cells, result) for where, cells in result.families.items()]
    return parts


def _footer() -> str:
    terms = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in _DEFINITIONS.items())
    return f"<footer><h2>Words</h2><dl>{terms}</dl></footer>"
