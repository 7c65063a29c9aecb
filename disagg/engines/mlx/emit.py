"""New rows of mlx-lm's caches, states and hidden states as blocks that a transfer can send.

The memory of an mlx array is also Python's, on a Mac that of its GPU, too: what is sent are views of it. Rows are
copied out of their caches, layer by layer, while the device computes the layers after them: a cache's array changes
with the next chunk. On the wire, eight bits are mx.quantize's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from disagg.api.layout import BITS, GROUP, Layout, is_quantised
from disagg.api.names import WireForm
from disagg.engines.mlx.cache import parts_of
from disagg.engines.mlx.prefix_cache import copies
from disagg.kv.blocks import Block, ChunkEnd, HiddenBlock, KVBlock, StateBlock

Arrays = list[Any]
Staged = tuple[Arrays, Callable[[], Block]]
"""What must be computed, and then the block."""


class Emitter:
    """Emits a prompt of `total` tokens chunk by chunk, from token `start` on. layout: of the layers that are computed.
    chunks: each can be used by itself; else only rows that the layout keeps of all tokens are emitted."""

    def __init__(
        self, layout: Layout, total: int, emit: Callable[[Block], None], wire: WireForm, start: int, *, chunks: bool
    ) -> None:
        self._layout, self._total, self._emit, self._wire, self._start = layout, total, emit, wire, start
        self._chunks = chunks

    def chunk(self, first: int, end: int, caches: Sequence[Any], hidden: Any, beat: Callable[[], None]) -> None:
        """Emit what is new of tokens [first, end), each as soon as it is computed. caches: of the layers of the layout,
        after these tokens. hidden: [1, tokens, hidden], their hidden states; None if none are sent. beat: called after
        each layer."""
        begin = max(first, self._start)
        layers = [list(self._layer(index, cache, begin, end)) for index, cache in enumerate(caches)]
        for staged in layers:
            _compute(array for arrays, _ in staged for array in arrays)
        if hidden is not None and begin < end:
            states = mx.contiguous(hidden[0, begin - first :])
            _compute([states])
        for staged in layers:
            for arrays, block in staged:
                mx.eval(arrays)
                self._emit(block())
            beat()
        if hidden is not None and begin < end:
            mx.eval(states)
            self._emit(HiddenBlock(begin, end, _bytes_of(states)))
        if self._chunks and begin < end:
            self._emit(ChunkEnd(begin, end))

    def _layer(self, index: int, cache: Any, begin: int, end: int) -> Iterator[Staged]:
        layout = self._layout.layers[index]
        kept = layout.rows(end if self._chunks else self._total, self._start)
        rows = range(max(begin, kept.start), end)
        for part in parts_of(cache):
            if not isinstance(part, ArraysCache):
                if rows:
                    yield self._rows(index, part, rows, end)
            elif end == self._total and self._total > self._start:
                states = zip(part.cache, layout.states, strict=True)
                arrays = [mx.contiguous(array.astype(getattr(mx, state.dtype))) for array, state in states]
                yield arrays, partial(_state, index, arrays)

    def _rows(self, index: int, cache: Any, rows: range, end: int) -> Staged:
        """The last rows of a cache after `end` tokens."""
        last = getattr(cache, "_idx", cache.offset)  # of a sliding layer, whose rows are not at their tokens' places
        some = slice(last - (end - rows.start), last - (end - rows.stop))
        keys, values = (
            self._planes(rows) if rows.shape[3] else []
            for rows in copies((cache.keys, cache.values), some.start, some.stop) or ()
        )

        def block() -> KVBlock:
            return KVBlock(index, rows.start, rows.stop, _heads(keys), _heads(values))

        return [*keys, *values], block

    def _planes(self, rows: Any) -> Arrays:
        """[1, heads, rows, dim] in the form that is sent, in memory of its own."""
        if is_quantised(rows.shape[-1], self._wire):
            return list(mx.quantize(rows, group_size=GROUP, bits=BITS))
        return [rows]


def _state(layer: int, arrays: Arrays) -> StateBlock:
    return StateBlock(layer, [_bytes_of(array) for array in arrays])


def _compute(arrays: Any) -> None:
    """Begin to compute these, without waiting for the end."""
    mx.async_eval(list(arrays))  # type: ignore[no-untyped-call]


def _heads(planes: Arrays) -> list[memoryview]:
    """The heads of the first plane, then those of the next."""
    views = []
    for plane in planes:
        whole, size = _bytes_of(plane), plane.nbytes // plane.shape[1]
        views += [whole[head * size : (head + 1) * size] for head in range(plane.shape[1])]
    return views


def _bytes_of(array: Any) -> memoryview:
    """The bytes of an evaluated, contiguous array, which they keep alive."""
    return memoryview(array.view(mx.uint8)).cast("B")
