"""Random KV in both frameworks' memory, without a model: what `disagg bench handoff` moves.

It is part of the engines because only they may import torch and mlx. Each is imported by what uses it: the sending
host need not have mlx, nor the receiving host torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy

from disagg.api.layout import Layout
from disagg.kv.blocks import Block
from disagg.kv.received import ReceivedKV

if TYPE_CHECKING:
    import torch

CHUNK_TOKENS = 2048  # tokens per emitted block, as in a chunked prefill


class SyntheticKV:
    """KV as in a prefill engine: keys and values per layer, [1, kv_heads, rows, dim], of random numbers.

    device: "auto", "cpu", "cuda", "mps".
    """

    def __init__(self, layout: Layout, tokens: int, device: str) -> None:
        import torch

        from disagg.engines.transformers.load import choose_device

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

    def emit(self, send: Callable[[Block], None]) -> None:
        """Emit all of it as a prefill does: chunk by chunk, layer by layer, through the same RowEmitter."""
        from disagg.engines.staging import RowEmitter

        emitter = RowEmitter(self._layout, self._tokens, self._device, send)
        for start in range(0, self._tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, self._tokens)
            for layer, (keys, values) in enumerate(self._tensors):
                kept = self._rows[layer]
                first = max(start, kept.start)
                if first < end:
                    rows = slice(first - kept.start, end - kept.start)
                    emitter(layer, first, keys[:, :, rows], values[:, :, rows])

    def flat(self) -> list[Any]:
        """Every tensor's bytes, keys and values alternating. uint8 arrays in CPU memory, views if the device is the
        CPU."""
        import torch

        return [tensor.cpu().view(torch.uint8).numpy().reshape(-1) for pair in self._tensors for tensor in pair]

    def _random(self, heads: int, rows: int, dim: int) -> torch.Tensor:
        import torch

        numbers = torch.rand((1, heads, rows, dim), dtype=torch.float32)
        return numbers.to(getattr(torch, self._layout.dtype)).to(self._device)


def ingest(kv: ReceivedKV) -> list[Any]:
    """Build evaluated mlx-lm caches from received KV. Returns the bytes of each tensor in them, keys and values
    alternating."""
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    from disagg.engines.mlx import cache as mlx_cache

    windows = [layer.window for layer in kv.layout.layers]
    model = SimpleNamespace(make_cache=lambda: [KVCache() if w is None else RotatingKVCache(w) for w in windows])
    arrays = [array for cache in mlx_cache.build(model, kv) for array in (cache.keys, cache.values)]
    return [numpy.frombuffer(memoryview(array).cast("B"), numpy.uint8) for array in arrays]


def copy_to_mlx(tensors: Sequence[Any]) -> None:
    """Copy bytes into evaluated mlx arrays, as a decode engine must if they were received into other memory."""
    import mlx.core as mx

    mx.eval([mx.array(tensor) for tensor in tensors])
