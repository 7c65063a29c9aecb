"""The result of `disagg bench handoff`: a row per transport, and the hand-off's rate divided by the others'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.api.handoff import HandoffFigures, TransportFigures
from disagg.units import size

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
