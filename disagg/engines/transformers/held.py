"""KV of finished prompts in torch tensors. Used on the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.api.layout import Layout
from disagg.engines.model.held import Layer, LayerArrays, LayerSnapshot, Prefix, PrefixCache

CachedPrefix = Prefix["Rows", LayerSnapshot]

SPARE_ROWS = 64
"""Rows of a sliding layer that are held beyond its window: a later prompt may differ in its last tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows(LayerArrays):
    """Rows of consecutive tokens. layers: None for those that do not keep every row."""

    def split(self, at: int) -> tuple[Rows, Rows]:
        halves = [(copies(layer, 0, at), copies(layer, at, None)) if layer else (None, None) for layer in self.layers]
        return Rows(tuple(upper for upper, _ in halves)), Rows(tuple(lower for _, lower in halves))


def make_store(layout: Layout, limit: int) -> PrefixCache[Rows, LayerSnapshot]:
    """A store for KV of this layout, of at most `limit` bytes. It holds nothing if a layer has both rows and a
    state."""
    if any(layer.states and layer.kv_heads for layer in layout.layers):
        return PrefixCache(0, None)
    if any(layer.states for layer in layout.layers):
        return PrefixCache(limit, 0)  # a state cannot be taken back to an earlier token
    windows = [layer.window for layer in layout.layers if layer.window is not None]
    return PrefixCache(limit, min(windows) + SPARE_ROWS if windows else None)


def copies(layer: Layer, start: int, end: int | None) -> Layer:
    """Rows [start, end) in memory of their own."""
    keys, values = (tensor[:, :, start:end].clone() for tensor in layer)
    return keys, values
