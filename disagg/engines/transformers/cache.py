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
from transformers.cache_utils import Cache, DummyLayer

from disagg.api.layout import Layout
from disagg.engines.model.architectures import Architecture
from disagg.engines.model.prefix_cache import LayerSnapshot, last_rows, segments
from disagg.engines.transformers.layers import CachedPrefix, FullLayer, Rows, SlidingLayer, StateLayer, make_layer

# (layer, index of the first new token, new keys, new values), [1, kv_heads, new, dim], in the order of the wire. Keys
# are views of the cache, and so are values unless the wire has another order.
OnRows = Callable[[int, int, torch.Tensor, torch.Tensor], None]
# (layer, the tensors of its state, as the wire has them but with the batch in front). They are overwritten later.
OnState = Callable[[int, tuple[torch.Tensor, ...]], None]


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What a model keeps. layout: that of the layers that keep something. indices: which of the model's layers these
    are, None if they are all. count: how many layers the model has, if some keep nothing."""

    layout: Layout
    architecture: Architecture = field(default_factory=Architecture)
    indices: tuple[int, ...] | None = None
    count: int = 0

    @property
    def places(self) -> tuple[int, ...]:
        """The model's layer of each layer of the layout."""
        return tuple(range(len(self.layout.layers))) if self.indices is None else self.indices


class PreallocatedCache(Cache):
    """The KV cache of one request of at most `total` tokens, computed in chunks of at most `chunk` tokens.

    on_rows is called inside `update`, before the layer's attention runs. Rows of a full layer never move and are
    written once, so views of them stay valid; those of a sliding layer are overwritten by later chunks. on_state is
    called once for each layer with a state, as soon as it has read all `total` tokens.
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
    ) -> None:
        layout, places = plan.layout, plan.places
        dtype = getattr(torch, layout.dtype)
        layers: list[Any] = [DummyLayer() for _ in range(max(plan.count, len(places)))]
        for place, layer in zip(places, layout.layers, strict=True):
            layers[place] = make_layer(layer, total, chunk, dtype, device)
        super().__init__(layers=layers)
        self._architecture = plan.architecture
        self._kept = [layers[place] for place in places]
        self._numbers = {place: number for number, place in enumerate(places)}
        self._total, self._after = total, 0
        self._on_rows, self._on_state = on_rows, on_state

    def begin(self, tokens: int) -> None:
        """The next `tokens` tokens are about to be computed."""
        self._after = self.get_seq_length() + tokens

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

    def layer_done(self, layer_idx: int) -> None:
        """A layer of the model has computed the tokens that were announced with `begin`."""
        if self._on_state is not None and self._after == self._total and layer_idx in self._numbers:
            self._report_state(self._numbers[layer_idx])

    def rows(self, start: int, end: int) -> Rows:
        """Rows [start, end) of the full layers, which stay valid if this cache is not updated any more."""
        return Rows(tuple(layer.rows(start, end) if isinstance(layer, FullLayer) else None for layer in self._kept))

    def snapshot(self) -> LayerSnapshot | None:
        """The sliding layers and the states as they are now, copied; None if there are none."""
        sliding = [layer for layer in self._kept if isinstance(layer, SlidingLayer)]
        states = [layer for layer in self._kept if isinstance(layer, StateLayer)]
        if not sliding and not states:
            return None
        usable_from = max((layer.usable_from for layer in sliding), default=0)
        return LayerSnapshot(
            tuple(_snapshot(layer) for layer in self._kept), self.get_seq_length() if states else usable_from
        )

    def load(self, prefix: CachedPrefix) -> None:
        """Begin with these rows of another cache. They are reported like new ones."""
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

    def _report(self, number: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self._on_rows is not None:
            self._on_rows(number, start, keys, self._architecture.wire_values(values))

    def _report_state(self, number: int) -> None:
        layer = self._kept[number]
        if self._on_state is not None and isinstance(layer, StateLayer):
            self._on_state(number, self._architecture.wire_states(layer.convolutions, layer.recurrent))


def _snapshot(layer: Any) -> tuple[torch.Tensor, ...] | None:
    if isinstance(layer, StateLayer):
        return layer.copy_state()
    return layer.last_rows() if isinstance(layer, SlidingLayer) else None
