"""KV of finished prompts in torch tensors. Used on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from disagg.engines.model.held import HeldStore, Prefix
from disagg.kv.layout import Layout

Layer = tuple[torch.Tensor, torch.Tensor]  # keys and values, [1, kv_heads, rows, dim]
HeldPrefix = Prefix["Rows", "Snapshot"]

SPARE_ROWS = 64
"""Rows of a sliding layer that are held beyond its window: a later prompt may differ in its last tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of consecutive tokens. layers: per layer, None for those that do not keep every row."""

    layers: tuple[Layer | None, ...]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.layers)

    def split(self, at: int) -> tuple[Rows, Rows]:
        """See model.held.tree.Rows."""
        halves = [(copies(layer, 0, at), copies(layer, at, None)) if layer else (None, None) for layer in self.layers]
        return Rows(tuple(upper for upper, _ in halves)), Rows(tuple(lower for _, lower in halves))


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The last rows of sliding layers after some token. layers: per layer, None for those that keep every row.
    usable_from: see model.held.tree.Snapshot."""

    layers: tuple[Layer | None, ...]
    usable_from: int

    @property
    def nbytes(self) -> int:
        return _nbytes(self.layers)


def make_store(layout: Layout, limit: int) -> HeldStore[Rows, Snapshot]:
    """A store for KV of this layout, of at most `limit` bytes."""
    windows = [layer.window for layer in layout.layers if layer.window is not None]
    return HeldStore(limit, min(windows) + SPARE_ROWS if windows else None)


def segments(prefix: HeldPrefix, layer: int) -> Iterator[tuple[int, Layer]]:
    """The rows of one layer that keeps every row, with the index of each piece's first, cut off after
    `prefix.tokens`."""
    start = 0
    for part in prefix.rows:
        pair = part.layers[layer]
        assert pair is not None, "this layer does not keep every row"
        keys, values = (tensor[:, :, : prefix.tokens - start] for tensor in pair)
        yield start, (keys, values)
        start += pair[0].shape[2]


def last_rows(prefix: HeldPrefix, layer: int) -> Layer:
    """The rows that a snapshot has of a sliding layer, in the order of the tokens, cut off after `prefix.tokens`."""
    pair = prefix.snapshot.layers[layer] if prefix.snapshot is not None else None
    assert pair is not None, "this layer keeps every row"
    count = pair[0].shape[2] - (prefix.snapshot_at - prefix.tokens)
    return pair[0][:, :, :count], pair[1][:, :, :count]


def copies(layer: Layer, start: int, end: int | None) -> Layer:
    """Rows [start, end) in memory of their own."""
    keys, values = (tensor[:, :, start:end].clone() for tensor in layer)
    return keys, values


def _nbytes(layers: Sequence[Layer | None]) -> int:
    return sum(int(tensor.nbytes) for layer in layers for tensor in layer or ())
