"""KV that no model computed, in the memory of both frameworks: what a rehearsed hand-off moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy
import torch
from mlx_lm.models.cache import KVCache, RotatingKVCache

from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.transformers.emit import RowEmitter
from disagg.engines.transformers.load import choose_device
from disagg.kv.blocks import Block
from disagg.kv.layout import Layout
from disagg.kv.received import ReceivedKV

CHUNK_TOKENS = 2048  # a chunked prefill's blocks


class SyntheticKV:
    """KV as a prefill engine holds it: per layer keys and values, [1, kv_heads, rows, dim], of random numbers.

    device: "auto", "cpu", "cuda", "mps".
    """

    def __init__(self, layout: Layout, tokens: int, device: str) -> None:
        self._layout = layout
        self._tokens = tokens
        self._device = choose_device(device)
        self._rows = [layer.rows(tokens) for layer in layout.layers]
        torch.manual_seed(0)
        self._tensors = [
            [self._random(layer.kv_heads, len(rows), dim) for dim in (layer.key_dim, layer.value_dim)]
            for layer, rows in zip(layout.layers, self._rows, strict=True)
        ]

    @property
    def device(self) -> str:
        return str(self._device.type)

    def emit(self, take: Callable[[Block], None]) -> None:
        """Hand all of it on as a prefill does: chunk by chunk, layer by layer, through the same RowEmitter."""
        emitter = RowEmitter(self._layout, self._tokens, self._device, take)
        for start in range(0, self._tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, self._tokens)
            for layer, (keys, values) in enumerate(self._tensors):
                kept = self._rows[layer]
                first = max(start, kept.start)
                if first < end:
                    rows = slice(first - kept.start, end - kept.start)
                    emitter(layer, first, keys[:, :, rows], values[:, :, rows])

    def flat(self) -> list[Any]:
        """Every tensor's bytes in CPU memory, keys and values in turn: uint8 arrays, views where it lies there."""
        return [tensor.cpu().view(torch.uint8).numpy().reshape(-1) for pair in self._tensors for tensor in pair]

    def _random(self, heads: int, rows: int, dim: int) -> torch.Tensor:
        numbers = torch.rand((1, heads, rows, dim), dtype=torch.float32)
        return numbers.to(getattr(torch, self._layout.dtype)).to(self._device)


def ready(kv: ReceivedKV) -> list[Any]:
    """Received KV as mlx-lm's caches, evaluated; then each tensor's bytes in them, keys and values in turn."""
    windows = [layer.window for layer in kv.layout.layers]
    model = SimpleNamespace(make_cache=lambda: [KVCache() if w is None else RotatingKVCache(w) for w in windows])
    arrays = [array for cache in mlx_cache.build(model, kv) for array in (cache.keys, cache.values)]
    return [numpy.frombuffer(memoryview(array).cast("B"), numpy.uint8) for array in arrays]


def as_arrays(tensors: Sequence[Any]) -> None:
    """Make evaluated mlx arrays of bytes: what a decode engine must do with those that came into other memory."""
    mx.eval([mx.array(tensor) for tensor in tensors])
