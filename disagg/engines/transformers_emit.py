"""New rows of a transformers cache as KVBlocks: views in CPU memory, zero-copy where the model runs there.

CPU: a full layer's block shows the cache itself. A sliding layer's cache is reused, so the few rows that the layout
keeps are copied to memory of their own. CUDA: rows go to pinned memory on a stream of their own while the next layer
computes, and the block's `wait` waits for that copy. MPS: rows are copied at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from disagg.kv.blocks import KVBlock
from disagg.kv.layout import Layout

Stage = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, Callable[[], None] | None]]


class RowEmitter:
    """An `on_rows` for PreallocatedCache: emits the rows that the layout keeps once all `total` tokens were read."""

    def __init__(self, layout: Layout, total: int, device: torch.device, emit: Callable[[KVBlock], None]) -> None:
        self._kept = [layer.rows(total) for layer in layout.layers]
        self._reused = [layer.kind == "sliding" for layer in layout.layers]
        self._emit = emit
        self._stage = _stage_for(device)

    def __call__(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: [1, kv_heads, new, dim], the rows from token `start` on."""
        end = start + keys.shape[2]
        first = max(start, self._kept[layer].start)
        if first >= end:
            return
        keys, values = keys[0, :, first - start :], values[0, :, first - start :]
        wait = None
        if self._stage is not None:
            keys, values, wait = self._stage(keys, values)
        elif self._reused[layer]:
            keys, values = keys.clone(), values.clone()
        self._emit(KVBlock(layer, first, end, head_views(keys), head_views(values), wait))


def head_views(rows: torch.Tensor) -> list[memoryview]:
    """The bytes of [heads, rows, dim] in CPU memory, one view per head, nothing copied."""
    array = rows.view(torch.uint8).numpy()  # numpy has no bfloat16
    return [head.reshape(-1).data for head in array]


def _stage_for(device: torch.device) -> Stage | None:
    if device.type == "cpu":
        return None
    return _CudaStage(device) if device.type == "cuda" else _copy_at_once


def _copy_at_once(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    return keys.cpu(), values.cpu(), None


class _CudaStage:
    """Device to pinned host memory on a second stream, as PyTorch's notes on CUDA semantics lay it out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None]]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            staged = self._copy(keys), self._copy(values)
            done = torch.cuda.Event()
            done.record(self._stream)
        return *staged, done.synchronize

    def _copy(self, rows: torch.Tensor) -> torch.Tensor:
        packed = rows.contiguous()  # one plain copy over the bus instead of one per head
        packed.record_stream(self._stream)
        rows.record_stream(self._stream)  # the cache may be dropped before the copy has run
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        return host.copy_(packed, non_blocking=True)
