"""The layers of a PreallocatedCache: all rows, the last rows, or a state of a fixed size; and what is held of them
after a prompt. Used on the engine's thread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from disagg.api.layout import LayerLayout, Layout
from disagg.engines.model.prefix_cache import Layer, LayerArrays, LayerSnapshot, Prefix, PrefixCache
from disagg.errors import ModelError


class _Layer(CacheLayerMixin):
    """Base of the kinds with rows: two buffers and a count of tokens."""

    is_sliding = False

    def __init__(self, layout: LayerLayout, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.keys = torch.empty(1, layout.kv_heads, rows, layout.key_dim, dtype=dtype, device=device)
        self.values = torch.empty(1, layout.kv_heads, rows, layout.value_dim, dtype=dtype, device=device)
        self.dtype, self.device = dtype, device
        self.is_initialized = True
        self.seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffers are allocated in the constructor."""

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.seen

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> int:
        """Number of new rows. ModelError if their shape or dtype is not that of the checkpoint's layout."""
        for name, new, buffer in (("keys", key_states, self.keys), ("values", value_states, self.values)):
            want = (1, buffer.shape[1], new.shape[2], buffer.shape[3])
            if tuple(new.shape) != want or new.dtype != buffer.dtype:
                raise ModelError(
                    f"transformers computes {name} of shape {tuple(new.shape)} {new.dtype}, the checkpoint's layout "
                    f"has {want} {buffer.dtype}",
                    "this architecture cannot be handed over",
                )
        return int(key_states.shape[2])


class FullLayer(_Layer):
    """All rows, in the order of the tokens. index: the keys of its indexer, if it has one."""

    index: FullLayer | None = None

    def __init__(self, layout: LayerLayout, total: int, chunk: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layout, total, dtype, device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.seen + self._check(key_states, value_states)
        self.keys[:, :, self.seen : end] = key_states
        self.values[:, :, self.seen : end] = value_states
        self.seen = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def rows(self, start: int, end: int) -> Layer:
        """Rows [start, end) in memory of their own; all rows at once are not copied."""
        if start == 0 and end == self.keys.shape[2]:
            return self.keys, self.values
        return copies((self.keys, self.values), start, end)

    def load(self, pieces: Iterable[tuple[int, Layer]], tokens: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Begin with these rows. Returns the first row's index, and the rows."""
        for start, (keys, values) in pieces:
            end = start + keys.shape[2]
            self.keys[:, :, start:end] = keys
            self.values[:, :, start:end] = values
        self.seen = tokens
        return 0, self.keys[:, :, :tokens], self.values[:, :, :tokens]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows, index of the first) that `query_length` new tokens attend to."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """The number of rows allocated."""
        return int(self.keys.shape[2])


class SlidingLayer(_Layer):
    """The last window - 1 rows and the newest chunk."""

    is_sliding = True

    def __init__(self, layout: LayerLayout, total: int, chunk: int, dtype: torch.dtype, device: torch.device) -> None:
        assert layout.window is not None
        self.window = layout.window
        # Room for a window of single tokens, so that decoding moves rows once per window and not at every token.
        super().__init__(layout, min(total, self.window - 1 + max(chunk, self.window)), dtype, device)
        self.end = 0  # rows in use

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = self._check(key_states, value_states)
        past = self._past()
        if self.end + new > self.keys.shape[2]:
            self._move_to_front(past)
        start, self.end = self.end, self.end + new
        self.keys[:, :, start : self.end] = key_states
        self.values[:, :, start : self.end] = value_states
        self.seen += new
        return self.keys[:, :, start - past : self.end], self.values[:, :, start - past : self.end]

    @property
    def usable_from(self) -> int:
        """The number of tokens after which `last_rows` has a whole window, or all rows."""
        first = self.seen - self._last()
        return first + self.window if first else 0

    def last_rows(self) -> Layer:
        """A copy of the last rows: the window, and up to SPARE_ROWS before it."""
        return copies((self.keys, self.values), self.end - self._last(), self.end)

    def load(self, rows: Layer, tokens: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Begin with these rows, the last ones before token `tokens`. Returns the first row's index, and the
        rows that it needs of them."""
        self.end, self.seen = min(rows[0].shape[2], self.window), tokens
        for buffer, held in zip((self.keys, self.values), rows, strict=True):
            buffer[:, :, : self.end] = held[:, :, held.shape[2] - self.end :]
        return tokens - self.end, self.keys[:, :, : self.end], self.values[:, :, : self.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows, index of the first) that `query_length` new tokens attend to."""
        past = self._past()
        return past + query_length, self.seen - past

    def get_max_length(self) -> int:
        """The window."""
        return self.window

    def _last(self) -> int:
        return min(self.end, self.window + SPARE_ROWS)

    def _past(self) -> int:
        return min(self.seen, self.window - 1)

    def _move_to_front(self, rows: int) -> None:
        for buffer in (self.keys, self.values):
            buffer[:, :, :rows] = buffer[:, :, self.end - rows : self.end].clone()  # the two may overlap
        self.end = rows


class StateLayer(LinearAttentionLayer):
    """A state of a fixed size, which every chunk replaces, in transformers' own form."""

    is_sliding = False

    @property
    def convolutions(self) -> list[torch.Tensor]:
        return [state for state in self.conv_states.values() if state is not None]

    @property
    def recurrent(self) -> list[torch.Tensor]:
        return [state for state in self.recurrent_states.values() if state is not None]

    def copy_state(self) -> Layer:
        """The state as it is now, in memory of its own."""
        return tuple(state.clone() for state in (*self.convolutions, *self.recurrent))

    def load_state(self, state: Layer) -> None:
        """Begin with a copy that another cache made."""
        convolution, *recurrent = state
        LinearAttentionLayer.lazy_initialization(self, conv_states=convolution)
        self.conv_states[0].copy_(convolution)
        self.has_previous_state[0] = True
        for one in recurrent:
            self.update_recurrent_state(one)


class HybridLayer(FullLayer, StateLayer):
    """A layer with both: attention over all tokens, and a state."""

    def __init__(self, layout: LayerLayout, total: int, chunk: int, dtype: torch.dtype, device: torch.device) -> None:
        StateLayer.__init__(self)
        FullLayer.__init__(self, layout, total, chunk, dtype, device)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the state only: the buffers of rows are allocated in the constructor."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)


class UncomputedLayer(CacheLayerMixin):
    """Stands for a layer with rows that another host computes: it has their count, for positions and masks."""

    def __init__(self, layout: LayerLayout) -> None:
        super().__init__()
        self.is_sliding = layout.kind == "sliding"
        self._window = layout.window
        self.seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: it holds nothing."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("this layer is not computed here")

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(rows, index of the first) that `query_length` new tokens would attend to."""
        past = self.seen if self._window is None else min(self.seen, self._window - 1)
        return past + query_length, self.seen - past

    def get_max_length(self) -> int:
        """-1: no rows are allocated."""
        return -1


def uncomputed(layout: LayerLayout) -> Any:
    """What stands for a layer of this layout that another host computes."""
    return StateLayer() if layout.kind == "state" else UncomputedLayer(layout)


def make_layer(layout: LayerLayout, total: int, chunk: int, dtype: torch.dtype, device: torch.device) -> Any:
    """An empty layer of this layout, for `total` tokens in chunks of at most `chunk`."""
    if layout.kind == "state":
        return StateLayer()
    if layout.kind == "sliding":
        return SlidingLayer(layout, total, chunk, dtype, device)
    return (HybridLayer if layout.states else FullLayer)(layout, total, chunk, dtype, device)


CachedPrefix = Prefix["Rows", LayerSnapshot]

SPARE_ROWS = 64
"""Rows of a sliding layer that are held beyond its window: a later prompt may differ in its last tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows(LayerArrays):
    """Rows of consecutive tokens. layers: None for those that do not keep every row."""

    def split(self, at: int) -> tuple[Rows, Rows]:
        halves = [(copies(layer, 0, at), copies(layer, at, None)) if layer else (None, None) for layer in self.layers]
        return Rows(tuple(upper for upper, _ in halves)), Rows(tuple(lower for _, lower in halves))


def make_prefix_cache(layout: Layout, limit: int) -> PrefixCache[Rows, LayerSnapshot]:
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
