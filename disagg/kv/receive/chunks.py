"""The chunks of one transfer, of which each connection brings a part: the memory that a chunk has beside that of the
whole prompt, and when all of it has come."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from disagg.errors import ProtocolError
from disagg.kv.arena import Arena
from disagg.kv.arriving import ArrivingKV, Chunk
from disagg.kv.frames import MAX_CHUNK_TOKENS, Header
from disagg.kv.received import ByteRanges, Window

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
        if header.hidden and end - start > MAX_CHUNK_TOKENS:
            raise ProtocolError(f"a chunk of {end - start} tokens with hidden states: at most {MAX_CHUNK_TOKENS} may")
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
