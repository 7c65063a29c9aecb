"""Held KV by layers, in arrays of any framework. Keys and values are [1, kv_heads, rows, dim]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from disagg.engines.model.held.store import Prefix

Layer = tuple[Any, ...]
"""Keys and values; or the arrays of a state."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerArrays:
    """layers: per layer, None for those that are held in another way."""

    layers: tuple[Layer | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for layer in self.layers for array in layer or ())


@dataclass(frozen=True, slots=True, eq=False)
class LayerSnapshot(LayerArrays):
    """What sliding and state layers hold after some token. layers: None for those that keep every row. usable_from: the
    least number of tokens that a request can go on from with it."""

    usable_from: int


def segments(prefix: Prefix[Any, Any], layer: int) -> Iterator[tuple[int, Layer]]:
    """The rows of one layer that keeps every row, with the index of each piece's first. Cut off after
    `prefix.tokens`."""
    start = 0
    for part in prefix.rows:
        arrays: Layer | None = part.layers[layer]
        assert arrays is not None, "this layer does not keep every row"
        rows = arrays[0].shape[2]
        yield start, _without_last(arrays, start + rows - prefix.tokens)
        start += rows


def last_rows(prefix: Prefix[Any, Any], layer: int) -> Layer:
    """The rows that a snapshot has of a sliding layer, in the order of the tokens; the arrays of a state. Cut off after
    `prefix.tokens`."""
    arrays: Layer | None = prefix.snapshot.layers[layer] if prefix.snapshot is not None else None
    assert arrays is not None, "this layer keeps every row"
    return _without_last(arrays, prefix.snapshot_at - prefix.tokens)


def _without_last(arrays: Layer, surplus: int) -> Layer:
    return arrays if surplus <= 0 else tuple(array[:, :, : array.shape[2] - surplus] for array in arrays)
