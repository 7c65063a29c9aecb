"""`disagg bench predict`: the speed of a fleet, predicted from its machines' arithmetic and memory speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.common.change import finish
from disagg.cli.common.completion import complete_device
from disagg.cli.common.context import Settings, settings
from disagg.cli.common.options import AsJson, model_option
from disagg.cli.views.items import plain_table
from disagg.cli.words import choose_models
from disagg.config import Fleet, Host
from disagg.errors import UsageError
from disagg.planning.capacity import Capacity, Forecast, Setup, Traffic, assess, hypothetical, traffic_within
from disagg.planning.devices import device
from disagg.planning.sizing import hardware_of, is_size, read_size, size_source
from disagg.planning.times import Link
from disagg.units import seconds

Device = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", help="In place of the hardware in hosts.toml.", autocompletion=complete_device),
]
PREDICTED = "predicted: "
FORMULAS = (
    "nothing was run; the sources of the figures: basis in --json",
    "TTFT = overhead + prefill + exposed + tail + ingest + first step",
    "total = overhead + prefill + exposed + tail + ingest + all steps",
)


def predict(
    context: typer.Context,
    *,
    model: Annotated[
        list[str] | None, model_option("A model of hosts.toml, shape:NAME or a path; all by default.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=1 << 20,
            metavar="N",
            help="Prompt length in tokens. Default: 8192, or what the context leaves beside the answer.",
            show_default=False,
        ),
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, max=1 << 20, metavar="N", help="Answer length in tokens.")] = 256,
    batch: Annotated[int, typer.Option(min=1, max=1024, metavar="N", help="Requests decoded together.")] = 16,
    link_gbps: Annotated[
        float, typer.Option(min=0.001, metavar="GBPS", help="Speed of the link between the machines, in Gb/s.")
    ] = 10,
    link_latency_ms: Annotated[float, typer.Option(min=0, metavar="MS", help="One-way latency of the link.")] = 0.05,
    prefill_device: Device = None,
    decode_device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Predict the hand-off against each machine alone, for the fleet of hosts.toml or for other machines."""
    traffic = partial(traffic_within, prompt_tokens=prompt_tokens, output_tokens=output_tokens, batch=batch)
    link = Link(link_gbps, link_latency_ms / 1e3)
    results = _assess(settings(context), model or (), link, traffic, (prefill_device, decode_device))
    body = {"predicted": True, "results": [result.to_json() for result in results]}
    finish(as_json, body, *map(capacity_view, results))


def _assess(
    chosen: Settings,
    names: Sequence[str],
    link: Link,
    traffic: Callable[[int], Traffic],
    devices: tuple[str | None, str | None],
) -> list[Capacity]:
    """The named models. `shape:NAME` and paths need no hosts.toml, but both devices. traffic: by context."""
    setups_ = [hypothetical(name, link, *devices) for name in names if is_size(name)]
    served = [name for name in names if not is_size(name)]
    if served or not names:
        fleet = chosen.fleet()
        setups_ += setups(fleet, choose_models(fleet, served or list(fleet.models)), link, *devices)
    return [assess(name, setup, traffic(context), context) for name, setup, context in setups_]


def setups(
    fleet: Fleet, models: Sequence[str], link: Link, prefill: str | None, decode: str | None
) -> Iterator[tuple[str, Setup, int]]:
    """(model, setup, context) for each model, by canonical name, on each pair of different machines that serve it.

    prefill, decode: devices in place of those of hosts.toml. Raises UsageError if a host has neither.
    """
    for name in models:
        model = fleet.models[name]
        found: dict[tuple[str, str], Setup] = {}
        for source, sink in _pairs(fleet, name):
            reader = device(hardware_of(source.name, source.hardware, prefill))
            writer = device(hardware_of(sink.name, sink.hardware, decode))
            if (reader.name, writer.name) not in found:
                size = read_size(size_source(model.name, model.sources.values()))
                setup = Setup(size, reader, writer, link, source.engine.dtype, source.engine.chunk_tokens)
                found[reader.name, writer.name] = setup
                yield name, setup, model.context


def _pairs(fleet: Fleet, model: str) -> list[tuple[Host, Host]]:
    pairs = [(a, b) for a in fleet.serving(model, "prefill") for b in fleet.serving(model, "decode")]
    if not pairs:
        raise UsageError(
            f"{model} has no pair of a prefill and a decode host in {fleet.path.name}", "add the missing one"
        )
    return pairs


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
    first, figures = ["predicted"], ("prefill", "exposed", "tail", "decode", "TTFT", "total")
    table = plain_table(*first, *figures, bold=first, fold=first, right=figures, whole=figures, gap=2)
    rows = (
        ("disaggregated", capacity.disaggregated),
        ("disaggregated, int8 KV", capacity.int8),
        ("split", capacity.split),
        (f"{setup.decode_device.name} alone", capacity.decode_alone),
        (f"{setup.prefill_device.name} alone", capacity.prefill_alone),
    )
    fastest = min(forecast.total_s for _, forecast in rows)
    for name, forecast in rows:
        table.add_row(name, *_cells(forecast), style="green" if forecast.total_s == fastest else "")
    return table


def _cells(forecast: Forecast) -> list[str]:
    exposed = seconds(forecast.exposed_s) if forecast.kv_bytes else "–"
    tail = seconds(forecast.tail_s) if forecast.tail_s else "–"
    parts = (forecast.decode_s, forecast.ttft_s, forecast.total_s)
    return [seconds(forecast.prefill_s), exposed, tail, *(seconds(part) for part in parts)]


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
    yield from _split(capacity)
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


def _split(capacity: Capacity) -> Iterator[str]:
    """What it is worth that both machines compute the prompt."""
    setup, layers, whole = capacity.setup, capacity.split_layers, capacity.setup.shape.layers
    reader = setup.prefill_device.name
    if layers == 0:
        yield f"split: {reader} computes none of {whole} layers"
    elif layers == whole:
        yield f"split: {reader} computes all {whole} layers, as in a hand-off"
    else:
        saved = capacity.disaggregated.ttft_s - capacity.split.ttft_s
        sent = _megabytes(capacity.split.kv_bytes)
        yield f"split: {reader} computes {layers} of {whole} layers and sends {sent}"
        yield f"its TTFT is {seconds(saved)} less than that of the hand-off"


def _link(capacity: Capacity) -> str:
    whole = capacity.disaggregated
    verb = "hidden" if whole.hidden else "not hidden"
    line = f"transfer {verb}: {_megabytes(whole.kv_bytes)} in {seconds(whole.transfer_s)}"
    if capacity.hiding_gbit_s is None:
        return f"{line}; no link would hide it"
    return f"{line}; {capacity.hiding_gbit_s:.1f} Gb/s would hide it"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
