"""The table of `disagg keys list`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table

from disagg.gateway.clients.keys import Key
from disagg.units import counted


def keys_view(keys: Sequence[Key]) -> RenderableType:
    """One row per key, revoked ones dimmed. On a narrow terminal names take several lines, and nothing is cut."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("name", "id", "models", "limits", "added", "revoked"):
        folds = heading == "name"
        table.add_column(heading, overflow="fold", no_wrap=not folds)
    for key in keys:
        table.add_row(
            key.name,
            key.id,
            "\n".join(key.models) if key.models else "all",
            "\n".join(_limits(key)) or "–",
            _date(key.created),
            _date(key.revoked) if key.revoked else "",
            style="dim" if key.revoked else None,
        )
    return table


def _limits(key: Key) -> Iterator[str]:
    """What the key may have, a line each."""
    if key.requests_per_minute is not None:
        yield f"{key.requests_per_minute:,} requests/min"
    if key.tokens_per_minute is not None:
        yield f"{key.tokens_per_minute:,} tokens/min"
    if key.parallel is not None:
        yield f"{counted(key.parallel, 'answer')} at once"
    if key.weight != 1:
        yield f"weight {key.weight}"
    if key.monitor:
        yield "monitor"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
