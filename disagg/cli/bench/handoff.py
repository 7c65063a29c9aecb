"""`disagg bench handoff`: the rate of a hand-off, compared with a bare socket and with base64 in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.api.handoff import HandoffFigures, HandoffSpec, TransportFigures
from disagg.cli.bench.link import Receiver, Sender
from disagg.cli.common.change import finish
from disagg.cli.common.completion import complete_shape
from disagg.cli.common.context import settings, stderr
from disagg.cli.common.options import AsJson, one_of, seconds_option
from disagg.cli.views.items import plain_table
from disagg.config import DType
from disagg.errors import UsageError
from disagg.extras import require
from disagg.units import size

if TYPE_CHECKING:
    from disagg.config import Fleet, Host
    from disagg.fleet.link.handoff import EndPlace
    from disagg.planning.shapes import ModelShape

TRANSPORTS: Final = {
    "handoff": "hand-off, to ready MLX caches",
    "raw_socket": "bare socket, to plain memory",
    "base64_json": "base64 in JSON over HTTP",
}


def handoff(
    context: typer.Context,
    *,
    sender: Sender = None,
    receiver: Receiver = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Whose KV: a known model, or the path of a config.json.", autocompletion=complete_shape
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=1 << 20, metavar="N", help="Prompt tokens of one hand-off.")] = 8192,
    dtype: Annotated[DType, typer.Option(metavar="DTYPE", help=f"Of the KV: {one_of(get_args(DType))}.")] = "bfloat16",
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Where the prefill host holds it: auto, cpu, cuda, mps.")
    ] = "auto",
    rounds: Annotated[
        int, typer.Option(min=1, max=100, metavar="N", help="Of each transport, alternating, after one that warms up.")
    ] = 5,
    timeout: Annotated[float, seconds_option(1, "Seconds for the whole command.")] = 900.0,
    as_json: AsJson = False,
) -> None:
    """Hand over random KV, from torch tensors to ready MLX caches, with the deployed code.

    Between two hosts with --from and --to, else between two processes of this machine. Neither models nor running
    servers are needed. The same processes also move the same bytes over a bare socket and as base64 in JSON.
    """
    if (sender is None) != (receiver is None):
        raise UsageError("--from and --to go together", "give both hosts, or neither to stay on this machine")
    fleet = settings(context).fleet() if sender is not None else None
    size = _shape(shape, fleet, sender)
    spec = HandoffSpec(
        windows=size.windows,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        dtype=dtype,
        tokens=tokens,
        rounds=rounds,
        device=device,
    )
    with stderr().status("connecting …") as status:
        places = _place(fleet, sender, "prefill"), _place(fleet, receiver, "decode")
        status.update(f"handing over {tokens} tokens of {size.name}, {rounds} rounds of three transports …")
        figures = _measure(places, spec, timeout)
    ends = {"from": sender or "this machine", "to": receiver or "this machine", "address": places[1].address}
    body = {**ends, "shape": size.name, "tokens": tokens, "dtype": dtype, **figures.to_json()}
    finish(as_json, body, handoff_view(body, figures))


def _measure(places: tuple[EndPlace, EndPlace], spec: HandoffSpec, timeout: float) -> HandoffFigures:
    from disagg.fleet.link.handoff import measure_handoff

    try:
        return measure_handoff(*places, spec, timeout)
    finally:
        for place in places:
            place.machine.close()


def _place(fleet: Fleet | None, name: str | None, end: str) -> EndPlace:
    from disagg.fleet.link.handoff import on_host, on_this_machine

    host = _host(fleet, name) if fleet is not None else None
    if host is None or host.server_kind.spawned:
        require(end)
    return on_this_machine(f"this machine ({end})") if host is None else on_host(host)


def _host(fleet: Fleet, name: str | None) -> Host:
    return fleet.select([name or ""], managed=True)[0]


def _shape(name: str | None, fleet: Fleet | None, sender: str | None) -> ModelShape:
    """The one that was asked for, else that of the sender's model, else Qwen3-Coder-30B's."""
    from disagg.planning.sizing import SHAPE, is_size, read_size, size_source

    if name is not None:
        return read_size(name if is_size(name) or Path(name).exists() else f"{SHAPE}{name}")
    if fleet is not None:
        model = fleet.models[_host(fleet, sender).model]
        return read_size(size_source(model.name, model.sources.values()))
    return read_size(f"{SHAPE}qwen3-coder-30b")


def handoff_view(body: Mapping[str, Any], figures: HandoffFigures) -> RenderableType:
    """The table, and the ratios below it. body: the object that --json prints."""
    what = f"{body['tokens']} tokens of {body['shape']}, {body['dtype']}: {size(figures.bytes)}"
    where = f"{body['from']} ({figures.device}) → {body['to']}, {body['address']}"
    ratios = (
        f"hand-off / bare socket {figures.ratio_to_raw:.2f}, "
        f"/ base64 in JSON {figures.ratio_to_base64_json:.0f}. "
        f"Medians of {figures.rounds}, alternating.\n"
        "No model ran: the KV is random."
    )
    return Group(Text(what, "bold"), Text(where), Text(), _table(figures.transports), Text(), Text(ratios, "dim"))


def _table(transports: Mapping[str, TransportFigures]) -> Table:
    figures = ("GB/s", "best", "CPU s/GB\nprefill", "CPU s/GB\ndecode")
    table = plain_table("transport", *figures, right=figures, gap=0)
    for name, title in TRANSPORTS.items():
        one = transports[name]
        cells = (one.gb_s, one.best_gb_s, one.sender_cpu_s_per_gb, one.receiver_cpu_s_per_gb)
        table.add_row(title, *(f"{cell:.3g}" for cell in cells))
    return table
