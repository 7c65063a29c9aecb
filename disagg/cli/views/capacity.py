"""A predicted capacity: disaggregated beside each machine alone. Every line is marked as predicted."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.planning.capacity import Capacity
from disagg.planning.plan import Forecast
from disagg.units import seconds

PREDICTED = "predicted: "
FORMULAS = (
    "nothing was run; the sources of the figures: basis in --json",
    "TTFT = overhead + prefill + exposed + ingest + first step",
    "total = overhead + prefill + exposed + ingest + decode (every step)",
)


def capacity_view(capacity: Capacity) -> RenderableType:
    """A title, the table, and a line per finding."""
    setup, traffic = capacity.setup, capacity.traffic
    title = Text.assemble(
        (PREDICTED, "dim"),
        (capacity.model, "bold"),
        f", {setup.prefill_device.name} → {setup.decode_device.name}, {setup.link.gbit_s:g} Gb/s\n",
        (PREDICTED, "dim"),
        f"{traffic.prompt_tokens:,} prompt + {traffic.output_tokens:,} output tokens",
    )
    lines = [Text.assemble((PREDICTED, "dim"), line) for line in _findings(capacity)]
    notes = [Text(f"{PREDICTED}{line}", "dim") for line in FORMULAS]
    return Group(title, _table(capacity), *lines, *notes, Text())


def _table(capacity: Capacity) -> Table:
    setup = capacity.setup
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("predicted", overflow="fold", style="bold")
    for name in ("prefill", "exposed", "decode", "TTFT", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = (
        ("disaggregated", capacity.disaggregated),
        ("disaggregated, int8 KV", capacity.int8),
        (f"{setup.decode_device.name} alone", capacity.decode_alone),
        (f"{setup.prefill_device.name} alone", capacity.prefill_alone),
    )
    fastest = min(forecast.total_s for _, forecast in rows)
    for name, forecast in rows:
        table.add_row(name, *_cells(forecast), style="green" if forecast.total_s == fastest else "")
    return table


def _cells(forecast: Forecast) -> list[str]:
    exposed = seconds(forecast.exposed_s) if forecast.kv_bytes else "–"
    parts = (forecast.decode_s, forecast.ttft_s, forecast.total_s)
    return [seconds(forecast.prefill_s), exposed, *(seconds(part) for part in parts)]


def _findings(capacity: Capacity) -> Iterator[str]:
    setup, traffic, whole = capacity.setup, capacity.traffic, capacity.disaggregated
    yield (
        f"disaggregated: {capacity.speedup_over_decode:.2f} x the speed of {setup.decode_device.name} alone, "
        f"{capacity.speedup_over_prefill:.2f} x that of {setup.prefill_device.name} alone"
    )
    if capacity.crossover_tokens is None:
        yield "it is faster than both machines alone at no prompt length"
    else:
        yield f"it is faster than both machines alone from {capacity.crossover_tokens:,} prompt tokens on"
    yield _link(capacity)
    saved = whole.total_s - capacity.int8.total_s
    yield (
        f"int8 on the wire: {_megabytes(capacity.int8.kv_bytes)} instead of {_megabytes(whole.kv_bytes)}, "
        + (f"{seconds(saved)} saved" if saved > 0 else "no time saved")
    )
    served = capacity.throughput
    yield (
        f"{served.batch} at once: {served.decode_tokens_per_s:,.0f} tok/s decoded; "
        f"{served.requests_per_s:.2f} requests/s, bound by {served.bound}"
    )
    if capacity.over_context:
        longest = traffic.prompt_tokens + traffic.output_tokens
        yield f"refused: prompt + answer, {longest:,} tokens, exceed the context of {capacity.context:,};"
        yield "lower --prompt-tokens or --output-tokens"
    for machine in capacity.crowded:
        yield f"does not fit into the memory of {machine}"


def _link(capacity: Capacity) -> str:
    whole = capacity.disaggregated
    verb = "hidden" if whole.hidden else "not hidden"
    line = f"transfer {verb}: {_megabytes(whole.kv_bytes)} in {seconds(whole.transfer_s)}"
    if capacity.hiding_gbit_s is None:
        return f"{line}; no link would hide it"
    return f"{line}; {capacity.hiding_gbit_s:.1f} Gb/s would hide it"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
