"""`disagg bench handoff`: the rate of a hand-off, compared with a bare socket and with base64 in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.api.handoff import HandoffFigures, HandoffSpec, TransportFigures
from disagg.cli.common.completion import complete_host, complete_shape
from disagg.cli.common.context import print_json, settings, stderr, stdout
from disagg.cli.common.options import AsJson, DTypeName, one_of, seconds_option
from disagg.errors import UsageError
from disagg.extras import require
from disagg.units import size

if TYPE_CHECKING:
    from disagg.config import Fleet, Host
    from disagg.fleet.link.handoff import EndPlace
    from disagg.planning.shapes import ModelShape


Sender = Annotated[
    str | None,
    typer.Option("--from", metavar="HOST", help="The prefill host that KV leaves.", autocompletion=complete_host),
]
Receiver = Annotated[
    str | None,
    typer.Option("--to", metavar="HOST", help="The decode host that KV reaches.", autocompletion=complete_host),
]
Shape = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Whose KV: a known model, or the path of a config.json.",
        autocompletion=complete_shape,
    ),
]
Tokens = Annotated[int, typer.Option(min=1, max=1 << 20, metavar="N", help="Prompt tokens of one hand-off.")]
Rounds = Annotated[
    int, typer.Option(min=1, max=100, metavar="N", help="Of each transport, alternating, after one that warms up.")
]


def handoff(
    context: typer.Context,
    *,
    sender: Sender = None,
    receiver: Receiver = None,
    shape: Shape = None,
    tokens: Tokens = 8192,
    dtype: Annotated[
        DTypeName, typer.Option(metavar="DTYPE", help=f"Of the KV: {one_of(DTypeName)}.")
    ] = DTypeName.BFLOAT16,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Where the prefill host holds it: auto, cpu, cuda, mps.")
    ] = "auto",
    rounds: Rounds = 5,
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
        dtype=dtype.value,
        tokens=tokens,
        rounds=rounds,
        device=device,
    )
    with stderr().status("connecting …") as status:
        places = _place(fleet, sender, "prefill"), _place(fleet, receiver, "decode")
        status.update(f"handing over {tokens} tokens of {size.name}, {rounds} rounds of three transports …")
        figures = _measure(places, spec, timeout)
    here = "this machine"
    report = HandoffReport(sender or here, receiver or here, places[1].address, size.name, tokens, dtype.value, figures)
    if as_json:
        print_json(report.to_json())
    else:
        stdout().print(handoff_view(report))


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


TRANSPORTS: Final = {
    "handoff": "hand-off, to ready MLX caches",
    "raw_socket": "bare socket, to plain memory",
    "base64_json": "base64 in JSON over HTTP",
}


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """What was measured, and where. sender, receiver: names of hosts. address: the receiver's. shape: the model."""

    sender: str
    receiver: str
    address: str
    shape: str
    tokens: int
    dtype: str
    figures: HandoffFigures

    def to_json(self) -> dict[str, Any]:
        """The object that --json prints."""
        return {
            "from": self.sender,
            "to": self.receiver,
            "address": self.address,
            "shape": self.shape,
            "tokens": self.tokens,
            "dtype": self.dtype,
            **self.figures.to_json(),
        }


def handoff_view(report: HandoffReport) -> RenderableType:
    """The table, and the ratios below it."""
    figures = report.figures
    what = f"{report.tokens} tokens of {report.shape}, {report.dtype}: {size(figures.bytes)}"
    where = f"{report.sender} ({figures.device}) → {report.receiver}, {report.address}"
    ratios = (
        f"hand-off / bare socket {figures.ratio_to_raw:.2f}, "
        f"/ base64 in JSON {figures.ratio_to_base64_json:.0f}. "
        f"Medians of {figures.rounds}, alternating.\n"
        "No model ran: the KV is random."
    )
    return Group(Text(what, "bold"), Text(where), Text(), _table(figures.transports), Text(), Text(ratios, "dim"))


def _table(transports: Mapping[str, TransportFigures]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("transport")
    for name in ("GB/s", "best", "CPU s/GB\nprefill", "CPU s/GB\ndecode"):
        table.add_column(name, justify="right")
    for name, title in TRANSPORTS.items():
        one = transports[name]
        cells = (one.gb_s, one.best_gb_s, one.sender_cpu_s_per_gb, one.receiver_cpu_s_per_gb)
        table.add_row(title, *(f"{cell:.3g}" for cell in cells))
    return table
