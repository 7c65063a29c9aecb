"""The buffers of one arriving KV cache: where each frame belongs, and whether all of it came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy

from disagg.errors import IntegrityError, Overloaded, ProtocolError
from disagg.kv.frames import Frame, Kind, Totals
from disagg.kv.layout import Layout
from disagg.kv.received import Buffer, ReceivedKV

PAGE_BYTES = 4096  # the smallest page in use; where pages are larger some writes are merely idle
WARM_BYTES = 8 << 20  # a few milliseconds


class Assembly:
    """Buffers for tokens [start, tokens) of `layout`, to be filled by frames in the protocol's order.

    Within one layer and kind the rows come contiguous and ascending; layers and kinds may interleave freely.
    """

    def __init__(self, layout: Layout, tokens: int, start: int) -> None:
        self._layout = layout
        self._tokens = tokens
        self._start = start
        try:
            self._allocate()
        except MemoryError as error:
            raise Overloaded(f"no memory for {layout.nbytes(tokens, start)} bytes of KV: {error}") from error
        self._missing_states = {(i, j) for i, states in enumerate(self._states) for j in range(len(states))}
        self._frames = 0
        self._bytes = 0

    def warm(self, wanted_elsewhere: Callable[[], bool]) -> None:
        """Touch every page, so that the kernel hands it out now and not while KV arrives; stops when told to."""
        for first in range(0, self._arena.nbytes, WARM_BYTES):
            if wanted_elsewhere():
                return
            self._arena[first : first + WARM_BYTES : PAGE_BYTES] = 0

    def place(self, frame: Frame) -> list[memoryview]:
        """Where the payload of the next frame goes, in wire order; ProtocolError where that frame may not come next."""
        views = self._place_state(frame) if frame.kind is Kind.STATE else self._place_rows(frame)
        self._frames += 1
        self._bytes += frame.length
        return views

    def finish(self, totals: Totals, digest: bytes) -> ReceivedKV:
        """The whole cache; ProtocolError where something is missing, IntegrityError where a bit was changed."""
        self._require_complete()
        if (totals.frames, totals.payload_bytes) != (self._frames, self._bytes):
            raise ProtocolError(
                f"the end frame counts {totals.frames} frames and {totals.payload_bytes} bytes, "
                f"{self._frames} and {self._bytes} arrived"
            )
        if totals.digest != digest:
            raise IntegrityError(
                f"the KV was changed on the way: its digest is {digest.hex()}, the sender's {totals.digest.hex()}",
                "repeat the request; if it happens again, test the network link and the memory of both hosts",
            )
        return ReceivedKV(
            layout=self._layout,
            tokens=self._tokens,
            keys=[run.buffer for run in self._keys],
            values=[run.buffer for run in self._values],
            states=self._states,
            start=self._start,
        )

    def _allocate(self) -> None:
        """One allocation for all: in 400 MB of separate buffers, page faults took longer than the copying (0.3 s)."""
        self._arena = numpy.empty(self._layout.nbytes(self._tokens, self._start), numpy.uint8)
        self._used = 0
        self._keys: list[_Run] = []
        self._values: list[_Run] = []
        self._states: list[list[Buffer]] = []
        for layer in self._layout.layers:
            rows = layer.rows(self._tokens, self._start)
            for runs, dim in ((self._keys, layer.key_dim), (self._values, layer.value_dim)):
                row_bytes = dim * self._layout.itemsize
                runs.append(_Run(rows, layer.kv_heads, row_bytes, self._take(layer.kv_heads * len(rows) * row_bytes)))
            states = layer.states if self._tokens > self._start else ()
            self._states.append([self._take(state.nbytes) for state in states])

    def _take(self, nbytes: int) -> Buffer:
        self._used += nbytes
        return self._arena[self._used - nbytes : self._used]

    def _place_rows(self, frame: Frame) -> list[memoryview]:
        runs = self._keys if frame.kind is Kind.KEYS else self._values
        if frame.layer >= len(runs) or frame.tensor != 0:
            raise ProtocolError(f"{_name(frame)} is not part of the model")
        return runs[frame.layer].take(frame)

    def _place_state(self, frame: Frame) -> list[memoryview]:
        key = (frame.layer, frame.tensor)
        if key not in self._missing_states or frame.start or frame.end:
            raise ProtocolError(f"{_name(frame)} is not expected, or came before")
        buffer = self._states[frame.layer][frame.tensor]
        _require_length(frame, buffer.nbytes)
        self._missing_states.remove(key)
        return [buffer.data]

    def _require_complete(self) -> None:
        for name, runs in (("keys", self._keys), ("values", self._values)):
            for layer, run in enumerate(runs):
                if not run.complete:
                    raise ProtocolError(f"truncated: the {name} of layer {layer} end at {run.next} of {run.rows.stop}")
        for layer, index in sorted(self._missing_states):
            raise ProtocolError(f"truncated: state {index} of layer {layer} is missing")


@dataclass(slots=True)
class _Run:
    """The keys or the values of one layer, [heads, rows, row_bytes], filled from the first row on."""

    rows: range
    heads: int
    row_bytes: int
    buffer: Buffer
    next: int = field(init=False)

    def __post_init__(self) -> None:
        self.next = self.rows.start

    @property
    def complete(self) -> bool:
        return self.next == self.rows.stop or self.buffer.nbytes == 0

    def take(self, frame: Frame) -> list[memoryview]:
        """One slice per head for the frame's rows, or one slice for all where it brings every row."""
        if self.complete:
            raise ProtocolError(f"{_name(frame)} comes after the last expected row")
        if frame.start != self.next:
            raise ProtocolError(f"{_name(frame)} is out of order: row {self.next} comes next")
        if not frame.start < frame.end <= self.rows.stop:
            raise ProtocolError(f"{_name(frame)} does not lie within rows [{self.rows.start}, {self.rows.stop})")
        size = (frame.end - frame.start) * self.row_bytes
        _require_length(frame, size * self.heads)
        self.next = frame.end
        whole = self.buffer.data
        if size * self.heads == len(whole):
            return [whole]
        stride = len(self.rows) * self.row_bytes
        first = (frame.start - self.rows.start) * self.row_bytes
        return [whole[head * stride + first : head * stride + first + size] for head in range(self.heads)]


def _require_length(frame: Frame, expected: int) -> None:
    if frame.length != expected:
        raise ProtocolError(f"{_name(frame)} announces {frame.length} payload bytes, the layout has {expected}")


def _name(frame: Frame) -> str:
    if frame.kind is Kind.STATE:
        return f"state {frame.tensor} of layer {frame.layer}"
    return f"rows [{frame.start}, {frame.end}) of the {frame.kind.name.lower()} of layer {frame.layer}"
