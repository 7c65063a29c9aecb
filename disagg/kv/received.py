"""A KV cache in the receiver's memory: where each tensor lies in its arena, and when it arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.api.layout import Layout, plane_bytes
from disagg.api.names import AS_IS, WireForm
from disagg.kv.arena import Arena, Buffer

ALIGNMENT = 256  # of each tensor, in bytes: more than the vector loads of CPUs and GPUs need


@dataclass(frozen=True, slots=True)
class ReceiveTiming:
    """time.monotonic() on the receiving host. If there was nothing to send, the byte times are the end frame's."""

    claimed: float = 0.0  # the ticket was accepted
    first_byte: float = 0.0  # the first frame began to arrive
    last_byte: float = 0.0  # the end frame was read
    accepted: float = 0.0  # coverage and digest were checked; the acknowledgement follows


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Some rows of one layer in memory. wanted: these, of the rows `stored` that [kv_heads, stored, row] has. keys,
    values: where each plane of them lies in `memory`."""

    memory: Any
    stored: range
    wanted: range
    keys: tuple[slice, ...]
    values: tuple[slice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Rows of a chunk that sliding layers keep after it, but not after the whole prompt. rows: of each layer."""

    rows: tuple[range, ...]
    ranges: ByteRanges
    arena: Arena

    @staticmethod
    def rows_of(layout: Layout, chunk: range, tokens: int) -> tuple[range, ...]:
        """Per layer the rows that are kept after this chunk, but not after all `tokens`."""
        rows = [(layer.rows(chunk.stop, chunk.start), layer.rows(tokens)) for layer in layout.layers]
        return tuple(range(after.start, max(after.start, min(after.stop, last.start))) for after, last in rows)


@dataclass(slots=True, eq=False)
class ReceivedKV:
    """The KV cache of tokens [start, tokens), in host memory.

    room: the tokens that its arena has place for; more than `tokens` if only the beginning of a prompt has come.
    windows: then what has come of sliding layers beside the arena, in order.
    wire: the form in which it was sent and is stored. sender, weights: see Header.
    arena: its memory, used as `ranges` states; None after `release`.
    return_arena: called with an arena that is no longer read.
    on_release: ends the use of the memory that was reserved for it.
    """

    layout: Layout
    tokens: int
    arena: Arena | None
    start: int = 0
    wire: WireForm = AS_IS
    sender: str = ""
    weights: str = ""
    timing: ReceiveTiming = field(default_factory=ReceiveTiming)
    return_arena: Callable[[Arena], None] | None = None
    on_release: Callable[[], None] | None = None
    room: int = 0
    windows: Sequence[Window] = ()
    ranges: ByteRanges = field(init=False)

    def __post_init__(self) -> None:
        self.room = self.room or self.tokens
        self.ranges = ByteRanges.of(self.layout, self.room, self.start, self.wire)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV in the form `wire`."""
        return self.layout.nbytes(self.tokens, self.start, self.wire)

    @property
    def keys(self) -> list[list[Buffer]]:
        """Per layer one uint8 array per plane, C order: [kv_heads, len(layers[l].rows(tokens, start)), bytes of a row].
        The form as-is has one plane, with rows of key_dim elements; the quantised form has three (see api.layout)."""
        return [self._views(planes) for planes in self.ranges.keys]

    @property
    def values(self) -> list[list[Buffer]]:
        """The memory of the values, as `keys` has that of the keys."""
        return [self._views(planes) for planes in self.ranges.values]

    @property
    def states(self) -> list[list[Buffer]]:
        """Per layer one uint8 array per state tensor; none if nothing was sent (tokens == start)."""
        return [self._views(places) for places in self.ranges.states]

    def rows(self, layer: int) -> list[Rows]:
        """The rows of one layer that it keeps after `tokens` tokens, in order: all in one piece unless `windows` has
        some. Only before `release`."""
        assert self.arena is not None, "the memory has been released"
        wanted = self.layout.layers[layer].rows(self.tokens, self.start)
        pieces = [(window.arena, window.rows[layer], window.ranges) for window in self.windows]
        pieces.append((self.arena, self.layout.layers[layer].rows(self.room, self.start), self.ranges))
        found = [(arena, stored, overlap(stored, wanted), ranges) for arena, stored, ranges in pieces]
        return [
            Rows(arena.memory, stored, some, ranges.keys[layer], ranges.values[layer])
            for index, (arena, stored, some, ranges) in enumerate(found)
            if some or (not wanted and index == len(found) - 1)
        ]

    def release(self, *, reuse: bool = False) -> None:
        """Release the memory, and what was reserved for it. Safe to call twice.

        reuse: nothing reads the memory any more, so a later transfer may use it. Otherwise it is freed with its last
        reference.
        """
        arena, self.arena = self.arena, None
        if arena is not None and reuse and self.return_arena is not None:
            self.return_arena(arena)
        if self.on_release is not None:
            self.on_release()

    def _views(self, places: tuple[slice, ...]) -> list[Buffer]:
        return [self.arena.data[place] for place in places] if self.arena is not None else []


@dataclass(frozen=True, slots=True)
class ByteRanges:
    """Byte ranges of an arena, per layer: of each plane of the keys and of the values, of each state tensor."""

    keys: tuple[tuple[slice, ...], ...]
    values: tuple[tuple[slice, ...], ...]
    states: tuple[tuple[slice, ...], ...]
    nbytes: int  # of the whole arena, gaps included

    @classmethod
    def of(cls, layout: Layout, tokens: int, start: int = 0, wire: WireForm = AS_IS) -> ByteRanges:
        """The ranges of the KV of tokens [start, tokens); all ranges are empty if there are no tokens."""
        rows = [layer.rows(tokens, start) for layer in layout.layers]
        return cls.over(layout, rows, wire, states=tokens > start)

    @classmethod
    def over(cls, layout: Layout, rows: Sequence[range], wire: WireForm, *, states: bool = False) -> ByteRanges:
        """The ranges of these rows of each layer, and of the states if they are wanted."""
        end = 0

        def take(nbytes: int) -> slice:
            nonlocal end
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + nbytes
            return slice(begin, end)

        keys: list[tuple[slice, ...]] = []
        values: list[tuple[slice, ...]] = []
        tensors: list[tuple[slice, ...]] = []
        for layer, some in zip(layout.layers, rows, strict=True):
            count = layer.kv_heads * len(some)
            for places, dim in ((keys, layer.key_dim), (values, layer.value_dim)):
                places.append(tuple(take(count * size) for size in plane_bytes(dim, layout.itemsize, wire)))
            tensors.append(tuple(take(state.nbytes) for state in layer.states if states))
        return cls(tuple(keys), tuple(values), tuple(tensors), end)


def overlap(one: range, other: range) -> range:
    """What two ranges of rows have in common."""
    first = max(one.start, other.start)
    return range(first, max(first, min(one.stop, other.stop)))
