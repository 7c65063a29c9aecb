"""What one pass of the model computes: which sequences, and how many prompt tokens. Pure.

A pass reads the weights once, and every sequence's KV left-padded to the longest. If memory bandwidth is the
bottleneck, a separate group therefore costs another read of the weights, and joining a group costs padding.

A step that computes a chunk of a prompt delays the next token of every running answer, and the engine reports progress
only after it: chunks of 2,048 tokens took over 10 s on a busy CPU at a context of 6,000. So their length follows the
speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from disagg.api.layout import Layout

CHUNK_S: Final = 0.5
FIRST_TOKENS: Final = 512
# Prompts that are computed together share the prompt tokens of one step; each gets at least this many. On the CPU
# backend attention allocates [prompts, heads, chunk, context] scores: with eight prompts of 4,000 tokens, the process
# of a 1 MB model grew to 1.5 GB with chunks of 2,048 tokens each, and to 0.5 GB when they shared one chunk.
LEAST_TOKENS: Final = 64


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


@dataclass(slots=True)
class ChunkLength:
    """The length of the next chunk: such that a step takes about CHUNK_S. most: tokens, the bound on it."""

    most: int
    _tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = min(self.most, FIRST_TOKENS)

    def length(self, prompts: int) -> int:
        """Tokens of each of `prompts` prompts that are computed together."""
        return max(self._tokens // max(1, prompts), min(self.most, LEAST_TOKENS))

    def took(self, seconds: float) -> None:
        """The step with the last chunk took `seconds`. At most doubles the length: the last chunk of a prompt is short,
        and would show a speed that no chunk has."""
        wanted = int(self._tokens * CHUNK_S / seconds) if seconds > 0 else self.most
        self._tokens = max(min(wanted, 2 * self._tokens, self.most), min(self.most, LEAST_TOKENS))
