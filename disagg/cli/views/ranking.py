"""Why a request goes to which hosts: `disagg generate --explain`."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from disagg.inference.hosts.route import Choice, Ranking
from disagg.units import seconds

NOTE = "expected: seconds that the request should spend on the host. Hosts are tried from top to bottom."
_SHOWN_S = 0.00005  # 0.1 ms when rounded
LOCAL = "If little of the prompt is left to compute, the decode host may compute it, without a prefill host."


def ranking_view(ranking: Ranking) -> RenderableType:
    """The hosts of each role, best first, then those that get no request now."""
    table = Table(
        title=f"hosts for {ranking.candidates.model}", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False
    )
    for name in ("role", "host", "expected", "why"):
        table.add_column(name, overflow="fold", justify="right" if name == "expected" else "left")
    for role, choices in (("decode", ranking.decode), ("prefill", ranking.prefill), ("whole", ranking.whole)):
        for choice in choices:
            table.add_row(role, choice.host.name, seconds(choice.cost_s), _why(choice))
    for host, obstacle in ranking.left_out.items():
        table.add_row("", Text(host, "dim"), "–", Text(f"gets no request: {obstacle}", "yellow"))
    notes = [NOTE, LOCAL] if ranking.offer else [NOTE]
    return Group(table, Text("\n".join(notes), "dim"))


def _why(choice: Choice) -> str:
    """As `Choice.reason`, its times in the units of the table."""
    parts = [f"{name} {seconds(cost)}" for name, cost in choice.costs.items() if cost >= _SHOWN_S]
    held = [f"holds {choice.held_tokens} tokens of the prompt"] if choice.held_tokens else []
    return ", ".join(held + parts) or "idle"
