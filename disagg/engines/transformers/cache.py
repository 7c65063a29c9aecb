"""A transformers Cache that is allocated once and reports the new rows of each layer.

Full layers have all rows, [1, kv_heads, total, dim]. Sliding layers have the last window - 1 rows and the current
chunk, moved to the front of their buffer when it is full. Nothing is concatenated: transformers' own DynamicCache
copies all previous rows for every chunk. Layers with a state are transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from disagg.api.layout import Layout, SplitLayout
from disagg.engines.model.architectures import Architecture
from disagg.engines.model.prefix_cache import LayerSnapshot, last_rows, segments
from disagg.engines.transformers.layers import (
    CachedPrefix,
    FullLayer,
    Rows,
    SlidingLayer,
    StateLayer,
    UncomputedLayer,
    make_layer,
    uncomputed,
)

# (layer, index of the first new token, new keys, new values), [1, kv_heads, new, dim], in the order of the wire. Keys
# are views of the cache, and so are values unless the wire has another order.
OnRows = Callable[[int, int, torch.Tensor, torch.Tensor], None]
# (layer, the tensors of its state, as the wire has them but with the batch in front). They are overwritten later.
OnState = Callable[[int, tuple[torch.Tensor, ...]], None]


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What a model keeps. layout: that of the layers that keep something. split: which of the model's layers these
    are."""

    layout: Layout
    split: SplitLayout
    architecture: Architecture = field(default_factory=Architecture)


class PreallocatedCache(Cache):
    """The KV cache of one request of at most `total` tokens, computed in chunks of at most `chunk` tokens.

    on_rows is called inside `update`, before the layer's attention runs. Rows of a full layer never move and are
    written once, so views of them stay valid; those of a sliding layer are overwritten by later chunks. on_state is
    called once for each layer with a state, as soon as it has read all `total` tokens. layers: only the model's first
    so many are computed; None: all.
    """

    def __init__(
        self,
        plan: CachePlan,
        total: int,
        chunk: int,
        device: torch.device,
        on_rows: OnRows | None = None,
        *,
        on_state: OnState | None = None,
        layers: int | None = None,
    ) -> None:
        layout, places = plan.layout, plan.split.places
        computed = places if layers is None else places[: plan.split.count(layers)]
        dtype = getattr(torch, layout.dtype)
        made: list[Any] = [DummyLayer() for _ in range(plan.split.layers)]
        self._kept: list[Any] = []
        self._numbers: dict[int, int] = {}
        for number, (place, layer) in enumerate(zip(places, layout.layers, strict=True)):
            if number >= len(computed):
                made[place] = uncomputed(layer)
                continue
            self._kept.append(make_layer(layer, total, chunk, dtype, device))
            if layer.kind == "index":
                made[place].index = self._kept[-1]
            else:
                made[place], self._numbers[place] = self._kept[-1], number
        super().__init__(layers=made)
        self._architecture, self._layout = plan.architecture, layout
        self._snapshots = any(not layer.keeps_every_row for layer in layout.layers)
        self._total, self._after = total, 0
        self._on_rows, self._on_state = on_rows, on_state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far, which layers with nothing but a state do not count."""
        if any(isinstance(layer, CacheLayerMixin) for layer in self.layers):
            return int(super().get_seq_length(layer_idx))
        return self._after

    def begin(self, tokens: int) -> None:
        """The next `tokens` tokens are about to be computed."""
        self._after = self.get_seq_length() + tokens

    def end(self) -> None:
        """All layers that are computed here have computed them."""
        self._count(self._after)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new rows of a layer; returns the rows that its attention uses."""
        layer = self.layers[layer_idx]
        start = layer.get_seq_length()
        keys, values = layer.update(key_states, value_states)
        new = key_states.shape[2]
        self._report(self._numbers[layer_idx], start, keys[:, :, -new:], values[:, :, -new:])
        return keys, values

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store the new keys of a layer's indexer, [1, new, dim]; returns those of all tokens."""
        index, new = self.layers[layer_idx].index, indexer_key_states[:, None]
        start = index.get_seq_length()
        keys, values = index.update(new, new[..., :0])
        self._report(self._numbers[layer_idx] + 1, start, keys[:, :, start:], values[:, :, start:])
        return keys[:, 0]

    def layer_done(self, layer_idx: int) -> None:
        """A layer of the model has computed the tokens that were announced with `begin`."""
        if self._on_state is not None and self._after == self._total and layer_idx in self._numbers:
            self._report_state(self._numbers[layer_idx])

    def rows(self, start: int, end: int) -> Rows:
        """Rows [start, end) of the full layers, which stay valid if this cache is not updated any more."""
        return Rows(tuple(layer.rows(start, end) if isinstance(layer, FullLayer) else None for layer in self._kept))

    def snapshot(self) -> LayerSnapshot | None:
        """The sliding layers and the states as they are now, copied; None if the model has none."""
        if not self._snapshots:
            return None
        sliding = [layer for layer in self._kept if isinstance(layer, SlidingLayer)]
        states = [layer for layer in self._kept if isinstance(layer, StateLayer)]
        usable_from = max((layer.usable_from for layer in sliding), default=0)
        return LayerSnapshot(
            tuple(_snapshot(layer) for layer in self._kept), self.get_seq_length() if states else usable_from
        )

    def load(self, prefix: CachedPrefix) -> None:
        """Begin with these rows of another cache. They are reported like new ones."""
        self._count(prefix.tokens)
        for number, layer in enumerate(self._kept):
            if isinstance(layer, StateLayer):
                layer.load_state(last_rows(prefix, number))
                if prefix.tokens == self._total:
                    self._report_state(number)
                continue
            if isinstance(layer, SlidingLayer):
                first, keys, values = layer.load(last_rows(prefix, number), prefix.tokens)
            else:
                first, keys, values = layer.load(segments(prefix, number), prefix.tokens)
            self._report(number, first, keys, values)

    def _count(self, tokens: int) -> None:
        self._after = tokens
        for layer in self.layers:
            if isinstance(layer, UncomputedLayer):
                layer.seen = tokens

    def _report(self, number: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self._on_rows is None:
            return
        if self._layout.layers[number].kind == "index":  # rotated as the vector of the layer before it
            keys = self._architecture.wire_index(keys, self._layout.layers[number - 1].value_dim)
            self._on_rows(number, start, keys, values)
        else:
            self._on_rows(number, start, keys, self._architecture.wire_values(values))

    def _report_state(self, number: int) -> None:
        layer = self._kept[number]
        if self._on_state is not None and isinstance(layer, StateLayer):
            self._on_state(number, self._architecture.wire_states(layer.convolutions, layer.recurrent))


def _snapshot(layer: Any) -> tuple[torch.Tensor, ...] | None:
    if isinstance(layer, StateLayer):
        return layer.copy_state()
    return layer.last_rows() if isinstance(layer, SlidingLayer) else None
