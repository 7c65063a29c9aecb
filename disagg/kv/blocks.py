"""The unit that moves: the keys and values of one layer for one run of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVBlock:
    """Rows [start, end) of one layer, ready or about to be ready to send.

    keys, values: one contiguous byte view per KV head, (end - start) * dim * itemsize bytes each, in head order. Of a
    tensor that is quantised on the wire (see `wire`): the views of its first plane, then of its second, then of its
    third, each (end - start) rows of that plane.
    The memory stays valid and unchanged until the transfer ends.
    wait: called by the sender before it reads the views (a CUDA copy still in flight, a quantisation yet to be done);
    None when they are ready.
    """

    layer: int
    start: int
    end: int
    keys: Sequence[memoryview]
    values: Sequence[memoryview]
    wait: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class StateBlock:
    """The fixed-size tensors of one ``state`` layer, one contiguous byte view each, final after the last token."""

    layer: int
    tensors: Sequence[memoryview]
    wait: Callable[[], None] | None = None


Block = KVBlock | StateBlock
