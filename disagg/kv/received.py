"""A complete KV cache in the receiver's memory: where each tensor lies in its arena, and when it arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(slots=True, eq=False)
class ReceivedKV:
    """The KV cache of tokens [start, tokens), in host memory.

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
    ranges: ByteRanges = field(init=False)

    def __post_init__(self) -> None:
        self.ranges = ByteRanges.of(self.layout, self.tokens, self.start, self.wire)

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
        end = 0

        def take(nbytes: int) -> slice:
            nonlocal end
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + nbytes
            return slice(begin, end)

        keys: list[tuple[slice, ...]] = []
        values: list[tuple[slice, ...]] = []
        states: list[tuple[slice, ...]] = []
        for layer in layout.layers:
            rows = layer.kv_heads * len(layer.rows(tokens, start))
            for places, dim in ((keys, layer.key_dim), (values, layer.value_dim)):
                places.append(tuple(take(rows * size) for size in plane_bytes(dim, layout.itemsize, wire)))
            shipped = layer.states if tokens > start else ()
            states.append(tuple(take(state.nbytes) for state in shipped))
        return cls(tuple(keys), tuple(values), tuple(states), end)
