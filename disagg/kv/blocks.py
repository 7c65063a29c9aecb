"""What a prefill engine emits and a transfer sends: rows of one layer's keys and values, one layer's state, what the
last computed layer passes on to the next, and the end of a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVBlock:
    """Rows [start, end) of one layer's keys and values.

    keys, values: one contiguous byte view per KV head, (end - start) * dim * itemsize bytes each, in head order. For a
    tensor that is quantised on the wire: the views of its first plane, then its second, then its third,
    each with (end - start) rows of that plane.
    The memory must stay valid and unchanged until the transfer ends.
    wait: called by the sender before it reads the views (a CUDA copy still in flight, a quantisation yet to be done);
    None if they are ready.
    """

    layer: int
    start: int
    end: int
    keys: Sequence[memoryview]
    values: Sequence[memoryview]
    wait: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class StateBlock:
    """The fixed-size tensors of one ``state`` layer after the last token, one contiguous byte view each."""

    layer: int
    tensors: Sequence[memoryview]
    wait: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class HiddenBlock:
    """The hidden states of tokens [start, end) after the last layer that this host computes.

    rows: [end - start, hidden] in the layout's dtype, contiguous bytes. wait: see KVBlock.
    """

    start: int
    end: int
    rows: memoryview
    wait: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class ChunkEnd:
    """Every block of tokens [start, end) but states has been emitted: of each layer those rows that are kept after
    `end` tokens, in one block."""

    start: int
    end: int


Block = KVBlock | StateBlock | HiddenBlock | ChunkEnd
