"""The chunks of one transfer, of which each connection brings a part: the memory that a chunk has beside that of the
whole prompt, when all of it has come, and where each frame of a part goes. Nothing of a chunk is used before its frame
has ended it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy

from disagg.api.layout import split_chunk
from disagg.errors import ProtocolError
from disagg.kv.arena import Arena, Buffer
from disagg.kv.arriving import ArrivingKV, Chunk
from disagg.kv.frames import Frame, Header, Kind
from disagg.kv.receive.assembly import Assembly, Plane, name, require_digest, require_length
from disagg.kv.received import ByteRanges, ReceivedKV, Window

EXPONENTS = {"float32": ("<u4", 0x7F800000), "float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80)}
AHEAD = 64  # chunks by which one connection may be ahead of another; each may have rows that are kept for a while


@dataclass(slots=True, eq=False)
class ComingChunk:
    """Tokens [start, end) while their rows arrive. window: memory for what only sliding layers keep after them. hidden:
    that of their hidden states. missing: connections that have not brought their parts."""

    number: int
    start: int
    end: int
    missing: int
    window: Window | None = None
    hidden: Arena | None = None


class Chunks:
    """Used by the threads of all connections of one transfer."""

    def __init__(self, arriving: ArrivingKV, attempt: int, header: Header) -> None:
        self._arriving, self._attempt, self._header = arriving, attempt, header
        self._lock = threading.Lock()
        self._coming: dict[int, ComingChunk] = {}
        self._whole = 0  # chunks that have come

    def open(self, number: int, start: int, end: int) -> ComingChunk:
        """The chunk with this number, which a connection begins to bring. ProtocolError if it has other tokens on
        another connection, or is out of bounds."""
        header = self._header
        if not start < end <= header.tokens:
            raise ProtocolError(f"a chunk of tokens [{start}, {end}) of a prompt of {header.tokens}")
        if header.hidden and end - start > (most := split_chunk(header.tokens)):  # memory is reserved for these
            raise ProtocolError(f"a chunk of {end - start} tokens with hidden states: at most {most} may come at once")
        with self._lock:
            chunk = self._coming.get(number)
            if chunk is None:
                if number >= self._whole + AHEAD:
                    raise ProtocolError(f"one part of the KV is {AHEAD} chunks ahead of another")
                chunk = self._coming[number] = ComingChunk(number, start, end, header.parts, self._window(start, end))
        if (chunk.start, chunk.end) != (start, end):
            raise ProtocolError(f"chunk {number} has tokens [{chunk.start}, {chunk.end}) and [{start}, {end})")
        return chunk

    def hidden(self, chunk: ComingChunk) -> Arena:
        """Memory for the hidden states of a chunk. ProtocolError if there is no credit for it."""
        if chunk.number >= self._arriving.progress.allowed:
            raise ProtocolError(f"chunk {chunk.number} comes before it may be sent")
        chunk.hidden = self._arriving.arenas.acquire((chunk.end - chunk.start) * self._header.hidden_bytes)
        return chunk.hidden

    def come(self, chunk: ComingChunk) -> None:
        """One connection has brought its part of a chunk, which is right."""
        with self._lock:
            chunk.missing -= 1
            if chunk.missing:
                return
            del self._coming[chunk.number]
            self._whole += 1
        self._arriving.put(self._attempt, Chunk(chunk.start, chunk.end, chunk.hidden), chunk.window)

    def _window(self, start: int, end: int) -> Window | None:
        layout, header = self._arriving.layout, self._header
        rows = Window.rows_of(layout, range(start, end), header.tokens)
        ranges = ByteRanges.over(layout, rows, header.wire)
        return Window(rows, ranges, self._arriving.arenas.acquire(ranges.nbytes)) if any(rows) else None


class ChunkedAssembly(Assembly):
    """One part of `kv`, filled chunk by chunk. Each layer of a chunk has one frame of each kind and plane, with the
    rows that the layer keeps at the end of the chunk; these come in any order, and before them what is needed of the
    chunk only. States come once, in any chunk or after the last."""

    def __init__(self, kv: ReceivedKV, header: Header, chunks: Chunks) -> None:
        super().__init__(kv, header.part)
        self._kv, self._header, self._chunks = kv, header, chunks
        self._chunk: ComingChunk | None = None  # that has begun to arrive
        self._hidden = False  # whether its hidden states have come
        self._number, self._next = 0, header.start  # of the next chunk, and its first token
        for plane in self._planes():
            plane.next = header.start

    def place_rows(self, frame: Frame) -> list[memoryview]:
        chunk = self._begin(frame)
        if frame.kind is Kind.HIDDEN:
            return self._place_hidden(frame, chunk)
        plane = self.plane(frame)
        rows = self._kv.layout.layers[frame.layer].rows(chunk.end, chunk.start)
        if plane.next == chunk.end or not plane.row_bytes:
            raise ProtocolError(f"{name(frame)} is not expected, or was already received")
        if range(frame.start, frame.end) != rows:
            raise ProtocolError(
                f"{name(frame)} is out of order: rows [{rows.start}, {rows.stop}) are those of the chunk "
                f"[{chunk.start}, {chunk.end})"
            )
        require_length(frame, len(rows) * plane.row_bytes * len(plane.heads))
        plane.next = chunk.end
        return self._views(frame, plane, rows, chunk)

    def end_chunk(self, frame: Frame, digest: bytes, sent: bytes) -> None:
        """A chunk frame: all of the chunk has come on this connection, with this digest. ProtocolError if something is
        missing, IntegrityError if the digests differ."""
        chunk = self._begin(frame)  # by this frame if a part has no rows
        if (frame.start, frame.end) != (chunk.start, chunk.end):
            raise ProtocolError(
                f"the end of chunk [{frame.start}, {frame.end}) comes, where chunk [{chunk.start}, {chunk.end}) ends"
            )
        self._require_rows_to(chunk.end)
        if self._wants_hidden and not self._hidden:
            raise ProtocolError(f"the hidden states of tokens [{chunk.start}, {chunk.end}) are missing")
        require_digest(f"the KV of tokens [{chunk.start}, {chunk.end})", digest, sent)
        if self._hidden and chunk.hidden is not None:
            self._require_numbers(chunk, chunk.hidden.data)
        self._chunk, self._hidden = None, False
        self._number, self._next = self._number + 1, chunk.end
        self._chunks.come(chunk)

    def require_complete(self) -> None:
        if self._chunk is not None or self._next != self._header.tokens:
            raise ProtocolError(f"truncated: the last chunk ends at {self._next} of {self._header.tokens}")

    @property
    def coming(self) -> range:
        """The tokens of the chunk that has begun to arrive; empty between two chunks."""
        return range(self._chunk.start, self._chunk.end) if self._chunk is not None else range(0)

    def _begin(self, frame: Frame) -> ComingChunk:
        """The chunk that this frame is of: the next one ends where the first frame of it does."""
        if self._chunk is None:
            self._chunk = self._chunks.open(self._number, self._next, frame.end)
        return self._chunk

    @property
    def _wants_hidden(self) -> bool:
        return self._header.hidden > 0 and self._header.part.hidden

    def _place_hidden(self, frame: Frame, chunk: ComingChunk) -> list[memoryview]:
        if not self._wants_hidden or self._hidden:
            raise ProtocolError(f"{name(frame)} are not expected, or were already received")
        if (frame.start, frame.end) != (chunk.start, chunk.end):
            raise ProtocolError(f"{name(frame)} are not those of the chunk [{chunk.start}, {chunk.end})")
        require_length(frame, (chunk.end - chunk.start) * self._header.hidden_bytes)
        self._hidden = True
        return [self._chunks.hidden(chunk).data[: frame.length].data]

    def _views(self, frame: Frame, plane: Plane, rows: range, chunk: ComingChunk) -> list[memoryview]:
        """The memory of rows: of each head the part beside the arena first, then that in it."""
        window = chunk.window
        beside = window.rows[frame.layer] if window is not None else range(0)
        if window is None or not beside:
            return plane.views(rows)
        places = (window.ranges.keys if frame.kind is Kind.KEYS else window.ranges.values)[frame.layer]
        buffer = window.arena.data[places[frame.tensor]]
        aside = Plane(beside, plane.heads, plane.row_bytes, buffer)
        if beside == rows:
            return aside.views(rows)
        inside = range(beside.stop, rows.stop)
        heads = [range(head, head + 1) for head in plane.heads]
        return [view for head in heads for view in (*aside.views(beside, head), *plane.views(inside, head))]

    def _require_rows_to(self, end: int) -> None:
        for plane in self._planes():
            if plane.heads and plane.row_bytes and plane.next != end:
                raise ProtocolError(f"truncated: rows of the chunk that ends at {end} are missing")

    def _require_numbers(self, chunk: ComingChunk, data: Buffer) -> None:
        """ProtocolError if a hidden state is infinite or not a number: all that is computed from it would be."""
        form, exponent = EXPONENTS[self._header.layout.dtype]
        words = data[: (chunk.end - chunk.start) * self._header.hidden_bytes].view(form)
        if bool(((words & numpy.array(exponent, form)) == exponent).any()):
            raise ProtocolError(
                f"the hidden states of tokens [{chunk.start}, {chunk.end}) are not all numbers",
                "see the prefill host's log; `disagg verify` compares the two hosts",
            )

    def _planes(self) -> list[Plane]:
        return [plane for layers in (self.keys, self.values) for planes in layers for plane in planes]
