"""The result of `disagg bench handoff`: a row per transport, and the hand-off's rate divided by the others'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.cli.views.units import size

TRANSPORTS: Final = {
    "handoff": "hand-off, to ready MLX caches",
    "raw_socket": "bare socket, to plain memory",
    "base64_json": "base64 in JSON over HTTP",
}


def handoff_view(report: Mapping[str, Any]) -> RenderableType:
    """The table, and the ratios below it."""
    what = f"{report['tokens']} tokens of {report['shape']}, {report['dtype']}: {size(report['bytes'])}"
    where = f"{report['from']} ({report['device']}) → {report['to']}, {report['address']}"
    ratios = (
        f"hand-off / bare socket {report['ratio_to_raw']:.2f}, "
        f"/ base64 in JSON {report['ratio_to_base64_json']:.0f}. "
        f"Medians of {report['rounds']}, alternating.\n"
        "No model ran: the KV is random."
    )
    return Group(Text(what, "bold"), Text(where), Text(), _table(report["transports"]), Text(), Text(ratios, "dim"))


def _table(transports: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("transport")
    for name in ("GB/s", "best", "CPU s/GB\nprefill", "CPU s/GB\ndecode"):
        table.add_column(name, justify="right")
    for name, title in TRANSPORTS.items():
        figures = transports[name]
        keys = ("gb_s", "best_gb_s", "sender_cpu_s_per_gb", "receiver_cpu_s_per_gb")
        table.add_row(title, *(f"{figures[key]:.3g}" for key in keys))
    return table
