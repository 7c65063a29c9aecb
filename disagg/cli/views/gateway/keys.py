"""The table of `disagg keys list`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table

from disagg.gateway.clients.keys import Key


def keys_view(keys: Sequence[Key]) -> RenderableType:
    """One row per key, revoked ones dimmed. On a narrow terminal names take several lines, and nothing is cut."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("name", "id", "models", "requests\n/min", "tokens\n/min", "added", "revoked"):
        right, folds = heading.endswith("/min"), heading == "name"
        table.add_column(heading, justify="right" if right else "left", overflow="fold", no_wrap=not (right or folds))
    for key in keys:
        table.add_row(
            key.name,
            key.id,
            "\n".join(key.models) if key.models else "all",
            _limit(key.requests_per_minute),
            _limit(key.tokens_per_minute),
            _date(key.created),
            _date(key.revoked) if key.revoked else "",
            style="dim" if key.revoked else None,
        )
    return table


def _limit(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
