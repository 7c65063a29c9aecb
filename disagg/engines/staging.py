"""New rows of a PyTorch engine's cache, and its states, as blocks in CPU memory that a transfer can send.

CPU: a full layer's block is a view of the cache. A sliding layer's cache is overwritten, so the few rows that the
layout keeps are copied to other memory. CUDA: rows are copied to pinned memory on a separate stream while the next
layer is computed, and the block's `wait` waits for that copy. MPS: rows are copied at once. States are always copied,
and never quantised.

Quantisation for the wire (see `api.layout`) runs before the copy on CUDA (on the same stream) and MPS. On a CPU it runs
in the block's `wait`, on the sender's thread: a prefill of 2048 tokens and 134 MB took 1.12 s, as without quantisation,
and 1.21 s with quantisation on the computing thread. So does `fill`, which puts rows in order.

Eight bits on the wire are, bit for bit, mlx's affine quantisation with 8 bits and groups of 64: a group of 64 elements
becomes a byte each, a scale and a bias: element = byte * scale + bias. The extreme of the group that is farther from
zero is exact, and zero is as close as a byte allows. Computed in float32, as in mlx's CPU backend; scales and biases
are then rounded to the tensor's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from disagg.api.layout import GROUP, Layout, is_quantised
from disagg.api.names import AS_IS, WireForm
from disagg.kv.blocks import Block, ChunkEnd, HiddenBlock, KVBlock, StateBlock

Wait = Callable[[], None]
# Writes rows into the memory that was given for them. Called once, on the computing thread or the sender's.
Fill = Callable[[], None]
Planes = tuple[torch.Tensor, ...]

LEVELS = 255
SMALLEST_SCALE = 1e-7
# Groups at a time on a CPU: temporaries stay in its cache, and torch does not distribute the work over threads.
PIECE = 32768 // GROUP


class RowEmitter:
    """Takes each layer's new rows, and emits those from `start` on that the layout keeps of `total` tokens. copied: the
    rows that it is given are copies already, also those of sliding layers. chunks: emits, of the rows that it is given
    at a time, those that the layout keeps at their end, so that a receiver can go on from the end of any chunk."""

    def __init__(
        self,
        layout: Layout,
        total: int,
        device: torch.device,
        emit: Callable[[Block], None],
        *,
        wire: WireForm = AS_IS,
        start: int = 0,
        copied: bool = False,
        chunks: bool = False,
    ) -> None:
        self._layout = layout
        self._total = None if chunks else total
        self._start = start
        self._any = total > start
        self._reused = [layer.kind == "sliding" and not copied for layer in layout.layers]
        self._emit = emit
        self._stager = _stager_for(device, wire)

    def wanted(self, layer: int, rows: range) -> range:
        """The part of `rows` that is emitted, if they are given."""
        kept = self._layout.layers[layer].rows(rows.stop if self._total is None else self._total, self._start)
        return range(min(max(rows.start, kept.start), rows.stop), rows.stop)

    def __call__(
        self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor, fill: Fill | None = None
    ) -> None:
        """keys, values: [1, kv_heads, new, dim], the rows from token `start` on. fill: writes them; None if they are
        there. Only for rows that are copies."""
        rows = self.wanted(layer, range(start, start + keys.shape[2]))
        if not rows:
            return
        keys, values = keys[0, :, rows.start - start :], values[0, :, rows.start - start :]
        if self._reused[layer]:  # copied on the computing stream: its next chunk may overtake a GPU's copy to the host
            keys, values = keys.clone(), values.clone()
        key_planes, value_planes, wait = self._stager(keys, values, fill)
        self._emit(KVBlock(layer, rows.start, rows.stop, plane_views(key_planes), plane_views(value_planes), wait))

    def state(self, layer: int, tensors: Iterable[torch.Tensor]) -> None:
        """tensors: the state of one layer after the last token, each with the batch in front."""
        if not self._any:
            return
        wanted = zip(tensors, self._layout.layers[layer].states, strict=True)
        copies = tuple(_copy(tensor[0], getattr(torch, state.dtype)) for tensor, state in wanted)
        staged, wait = self._stager.copied(copies)
        self._emit(StateBlock(layer, [view for tensor in staged for view in head_views(tensor[None])], wait))

    def hidden(self, start: int, states: torch.Tensor) -> None:
        """states: [1, new, hidden], the hidden states from token `start` on, which nothing else uses."""
        first, end = max(start, self._start), start + states.shape[1]
        if first < end:
            (rows,), wait = self._stager.copied((states[0, first - start :].contiguous(),))
            self._emit(HiddenBlock(first, end, head_views(rows[None])[0], wait))

    def chunk_end(self, start: int, end: int) -> None:
        """All of tokens [start, end) was given."""
        if max(start, self._start) < end:
            self._emit(ChunkEnd(max(start, self._start), end))


def _copy(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def plane_views(planes: Iterable[torch.Tensor]) -> list[memoryview]:
    """The heads of the first plane, then those of the next."""
    return [view for plane in planes for view in head_views(plane)]


def head_views(rows: torch.Tensor) -> list[memoryview]:
    """The bytes of [heads, rows, dim] in CPU memory, one view per head."""
    array = rows.view(torch.uint8).numpy()  # numpy has no bfloat16
    return [head.reshape(-1).data for head in array]


def _stager_for(device: torch.device, wire: WireForm) -> _CpuStager | _BlockingStager | _CudaStager:
    if device.type == "cuda":
        return _CudaStager(device, wire)
    return _CpuStager(wire) if device.type == "cpu" else _BlockingStager(wire)


class _CpuStager:
    """Rows [heads, rows, dim] of keys and values -> the planes of each, and the `wait` of their block. They are not
    copied, but filled in and quantised in that `wait`. copied: the same for tensors that nothing else uses."""

    def __init__(self, wire: WireForm) -> None:
        self._wire = wire

    def __call__(
        self, keys: torch.Tensor, values: torch.Tensor, fill: Fill | None
    ) -> tuple[Planes, Planes, Wait | None]:
        staged, unquantised = [], []
        for rows in (keys, values):
            if is_quantised(rows.shape[-1], self._wire):
                planes = empty_planes(rows)
                unquantised.append((rows, planes))
                staged.append(planes)
            else:
                staged.append((rows,))

        def wait() -> None:
            if fill is not None:
                fill()
            for rows, planes in unquantised:
                fill_planes(rows, planes)

        return staged[0], staged[1], wait if fill is not None or unquantised else None

    def copied(self, tensors: Planes) -> tuple[Planes, None]:
        return tensors, None


class _BlockingStager:
    """Rows are quantised and copied at once, on the computing thread (MPS)."""

    def __init__(self, wire: WireForm) -> None:
        self._wire = wire

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, fill: Fill | None) -> tuple[Planes, Planes, None]:
        if fill is not None:
            fill()
        return self._copy(keys), self._copy(values), None

    def copied(self, tensors: Planes) -> tuple[Planes, None]:
        return tuple(tensor.cpu() for tensor in tensors), None

    def _copy(self, rows: torch.Tensor) -> Planes:
        return tuple(plane.cpu() for plane in filled_planes(rows, self._wire))


class _CudaStager:
    """Device to pinned host memory on a second stream, as described in PyTorch's notes on CUDA semantics."""

    def __init__(self, device: torch.device, wire: WireForm) -> None:
        self._device = device
        self._wire = wire
        self._stream = torch.cuda.Stream(device)

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, fill: Fill | None) -> tuple[Planes, Planes, Wait]:
        if fill is not None:
            fill()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            staged = self._copy(keys), self._copy(values)
            done = torch.cuda.Event()
            done.record(self._stream)
        return *staged, done.synchronize

    def copied(self, tensors: Planes) -> tuple[Planes, Wait]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor in tensors:
                tensor.record_stream(self._stream)
            staged = tuple(self._to_host(tensor) for tensor in tensors)
            done = torch.cuda.Event()
            done.record(self._stream)
        return staged, done.synchronize

    def _copy(self, rows: torch.Tensor) -> Planes:
        rows.record_stream(self._stream)  # the cache may be freed before the copy has run
        return tuple(self._to_host(plane) for plane in filled_planes(rows, self._wire))

    def _to_host(self, plane: torch.Tensor) -> torch.Tensor:
        """Copy a plane, which was allocated on this stream."""
        host = torch.empty(plane.shape, dtype=plane.dtype, pin_memory=True)
        return host.copy_(plane, non_blocking=True)


def empty_planes(rows: torch.Tensor) -> Planes:
    """Memory for the planes of [heads, rows, dim], on the same device: packed bytes, scales, biases."""
    heads, count, dim = rows.shape
    packed = torch.empty(heads, count, dim, dtype=torch.uint8, device=rows.device)
    return packed, *(torch.empty(heads, count, dim // GROUP, dtype=rows.dtype, device=rows.device) for _ in range(2))


def filled_planes(rows: torch.Tensor, wire: WireForm) -> Planes:
    """The planes of [heads, rows, dim], on the same device; one contiguous plane if the rows are sent as-is."""
    if not is_quantised(rows.shape[-1], wire):
        return (rows.contiguous(),)
    planes = empty_planes(rows)
    fill_planes(rows, planes)
    return planes


def fill_planes(rows: torch.Tensor, planes: Planes) -> None:
    """Write [heads, rows, dim] into memory from `empty_planes`."""
    with torch.inference_mode():
        if rows.device.type == "cpu":
            for head, target in enumerate(zip(*planes, strict=True)):
                _fill_by_pieces(rows[head], target)
        else:
            for plane, part in zip(planes, _quantised(rows.reshape(-1, GROUP)), strict=True):
                plane.view(part.shape).copy_(part)


def _fill_by_pieces(rows: torch.Tensor, planes: Planes) -> None:
    """One head, [rows, dim]."""
    groups = rows.reshape(-1, GROUP)
    packed, scales, biases = planes[0].view(-1, GROUP), planes[1].view(-1, 1), planes[2].view(-1, 1)
    for first in range(0, len(groups), PIECE):
        piece = slice(first, first + PIECE)
        for plane, part in zip((packed, scales, biases), _quantised(groups[piece]), strict=True):
            plane[piece].copy_(part)


def _quantised(groups: torch.Tensor) -> Planes:
    """[n, GROUP] -> float32 levels [n, GROUP], scales [n, 1], biases [n, 1]."""
    groups = groups.float()
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)  # aminmax takes five times as long
    low_is_far = low.abs() > high.abs()
    levels = torch.full((), LEVELS, dtype=groups.dtype, device=groups.device)  # CUDA multiplies with 1 / a number
    scale = ((high - low) / levels).clamp_(min=SMALLEST_SCALE)
    scale = torch.where(low_is_far, scale, -scale)
    edge = torch.where(low_is_far, low, high)
    steps = torch.round(edge / scale)
    reaches_zero = steps != 0
    scale = torch.where(reaches_zero, edge / steps, scale)
    bias = torch.where(reaches_zero, edge, 0.0)
    return torch.sub(groups, bias).div_(scale).round_().clamp_(0, LEVELS), scale, bias
