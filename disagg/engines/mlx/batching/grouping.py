"""Choose which sequences decode in one pass. Pure.

A pass reads the weights once, and every sequence's KV left-padded to the longest. If memory bandwidth is the
bottleneck, a separate group therefore costs another read of the weights, and joining a group costs padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.api.layout import Layout


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence. context: its tokens so far. rest: the steps that it may still take."""

    context: int
    rest: int


def choose_group(
    groups: Sequence[Sequence[Row]], new: Row, kv_bytes: Callable[[int], int], pass_bytes: int
) -> int | None:
    """The index of the group that `new` should join, None for a new group.

    kv_bytes: tokens -> bytes of KV. pass_bytes: read by one more pass. `new` joins the group to which it adds the least
    padding, if the group's whole padding over the steps that they share costs no more than a second pass. So no group
    wastes more than grouping could save.
    """
    best, least = None, 0
    for index, rows in enumerate(groups):
        shared = min(new.rest, max(row.rest for row in rows))
        padding = _padding([*rows, new], shared, kv_bytes)
        added = padding - _padding(rows, shared, kv_bytes)
        if padding <= pass_bytes * shared and (best is None or added < least):
            best, least = index, added
    return best


def kv_growth(layout: Layout) -> Callable[[int], int]:
    """A function tokens -> bytes of KV: `layout.nbytes` without fixed-size states, at a fraction of its cost."""
    by_window: Counter[int | None] = Counter()
    for layer in layout.layers:
        by_window[layer.window] += layer.kv_heads * (layer.key_dim + layer.value_dim) * layout.itemsize
    kinds = tuple(by_window.items())

    def kv_bytes(tokens: int) -> int:
        return sum(row * (tokens if window is None else min(tokens, window)) for window, row in kinds)

    return kv_bytes


def _padding(rows: Sequence[Row], steps: int, kv_bytes: Callable[[int], int]) -> int:
    """Bytes of padding that a group reads over `steps` steps. A row is padded until it or the longest row ends."""
    longest = max(rows, key=lambda row: row.context)
    whole = kv_bytes(longest.context)
    return sum((whole - kv_bytes(row.context)) * min(row.rest, longest.rest, steps) for row in rows)
