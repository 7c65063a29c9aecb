"""Which sequences decode in one pass. Pure.

A pass reads the weights once, and every sequence's KV left-padded to the longest. On a machine whose memory is the
bottleneck a group of its own therefore costs another read of the weights, and a place in a group costs padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.kv.layout import Layout


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: the tokens it holds, and the steps that it may still take."""

    context: int
    rest: int


def choose(groups: Sequence[Sequence[Row]], new: Row, kv_bytes: Callable[[int], int], pass_bytes: int) -> int | None:
    """The index of the group that `new` should join, None for a group of its own.

    kv_bytes: tokens -> bytes of KV; pass_bytes: what one more pass reads. `new` joins where that adds the least
    padding; but over the steps that it would share with a group, all padding of the group, its own and what was there,
    must cost no more than a second pass would. So no group ever wastes more than grouping could save.
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
    """What `layout.nbytes` says of a number of tokens, fixed-size states aside, at a fraction of its price."""
    by_window: Counter[int | None] = Counter()
    for layer in layout.layers:
        by_window[layer.window] += layer.kv_heads * (layer.key_dim + layer.value_dim) * layout.itemsize
    kinds = tuple(by_window.items())

    def kv_bytes(tokens: int) -> int:
        return sum(row * (tokens if window is None else min(tokens, window)) for window, row in kinds)

    return kv_bytes


def _padding(rows: Sequence[Row], steps: int, kv_bytes: Callable[[int], int]) -> int:
    """Bytes of padding that a group reads over so many steps: a row's ends with the row, or with the longest."""
    longest = max(rows, key=lambda row: row.context)
    whole = kv_bytes(longest.context)
    return sum((whole - kv_bytes(row.context)) * min(row.rest, longest.rest, steps) for row in rows)
