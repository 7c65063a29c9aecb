"""The receiver fed with any bytes, without sockets and threads, and what must hold whatever they are.

    python -m tests.kv.fuzz SECONDS

runs a coverage-guided fuzzer (atheris, in the extra `fuzz`) on it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy

from disagg.api.layout import Layout
from disagg.api.names import KV_CHUNKS, KV_WHOLE
from disagg.errors import (
    DisaggError,
    FingerprintMismatch,
    IntegrityError,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    TicketRefused,
)
from disagg.kv import frames
from disagg.kv.arena import Arenas, Reservation
from disagg.kv.arriving import ArrivingKV, Chunk
from disagg.kv.channel import Channel
from disagg.kv.preamble import (
    NONCE_BYTES,
    OPENING,
    PREAMBLE,
    PROOF,
    PROOF_BYTES,
    Nonces,
    check_opening,
    decode_preamble,
    decode_proof,
    encode_preamble,
    proof,
    proves,
)
from disagg.kv.receive.pace import ReceiveLimits
from disagg.kv.receive.part import receive_part
from disagg.kv.receive.tickets import IssuedTicket, KVOutcome, Tickets
from disagg.kv.received import ByteRanges, ReceivedKV
from tests.kv.chunk_parts import Prompt, frames_for, stream_of
from tests.kv.kv_parts import PATIENCE_S, Cache, Parts, expected, header_for, mixed_layout, opened, parts_of, stream

PROMPT = Prompt.random(12, 3)
CACHE = Cache.random(mixed_layout(), 12, 3)
NONCE = bytes(NONCE_BYTES)
SPARE = 2.0  # an arena may be a little larger than requested
LIMITS = ReceiveLimits()
# The errors that a sender may get: anything else is a defect.
STATED = (ProtocolError, IntegrityError, PeerLost, TicketRefused, LayoutMismatch, FingerprintMismatch)


class MemoryChannel(Channel):
    """A connection whose bytes are all there: reading past them is the peer's disconnecting."""

    def __init__(self, raw: bytes) -> None:
        self.peer = "the fuzzer"
        self.deadline = 0.0
        self.idle_s = 0.0
        self.replies = b""
        self._raw = memoryview(raw)

    def read_into(self, views: Sequence[memoryview], on_piece: Callable[[memoryview], object] | None = None) -> None:
        for view in views:
            if len(view) > len(self._raw):
                raise PeerLost(f"{self.peer} closed the connection before the transfer was complete")
            view[:] = self._raw[: len(view)]
            self._raw = self._raw[len(view) :]
            if on_piece is not None:
                on_piece(view)

    def write(
        self,
        views: Sequence[memoryview],
        on_piece: Callable[[memoryview], object] | None = None,
        *,
        on_reply: Callable[[], bool] | None = None,
    ) -> bool:
        self.replies += b"".join(views)
        return True

    def reply(self, raw: bytes) -> None:
        self.replies += raw

    def abort(self) -> None:
        pass

    def close_gently(self, linger_s: float) -> None:
        pass


@dataclass
class Host:
    """The receiver's side of one ticket. allocated: the size of each allocation."""

    cache: Cache | Prompt = CACHE
    allocated: list[int] = field(default_factory=list)
    outcomes: list[KVOutcome] = field(default_factory=list)
    tickets: Tickets = field(init=False)
    memory: Reservation = field(init=False)
    slot: IssuedTicket = field(init=False)

    def __post_init__(self) -> None:
        self.tickets = Tickets(Arenas(self._allocate))
        self.memory = Reservation(1 << 20, lambda nbytes: None)
        deadline = time.monotonic() + PATIENCE_S
        assert isinstance(self.cache, Cache)
        self.slot = self.tickets.issue(
            expected(self.cache), self.outcomes.append, deadline=deadline, memory=self.memory
        )

    def _allocate(self, nbytes: int) -> object:
        self.allocated.append(nbytes)
        return numpy.zeros(nbytes, numpy.uint8)

    def receive(self, raw: bytes) -> DisaggError | None:
        """One connection. Returns the error that refused it before it had a slot."""
        channel = MemoryChannel(raw)
        try:
            check_opening(bytes(raw[: OPENING.size]).ljust(OPENING.size, b"\0"))
            preamble = decode_preamble(channel.read(PREAMBLE.size))
            ticket = self.tickets.find(preamble.ticket_digest)
            given = decode_proof(channel.read(PROOF.size))
            if not proves(given.proof, ticket, "sender", Nonces(preamble.nonce, NONCE, preamble.version)):
                raise TicketRefused("not its proof")
            slot = self.tickets.claim(ticket, channel.abort)
        except DisaggError as error:
            return error
        receive_part(channel, slot, given.header_bytes, self.tickets, LIMITS, version=preamble.version)
        return None

    def sent(self, raw: bytes, version: int = KV_WHOLE) -> bytes:
        """A preamble, and `raw` with its proof (see `opened`)."""
        true = proof(self.slot.ticket, "sender", Nonces(NONCE, NONCE, version))
        return encode_preamble(self.slot.ticket, NONCE, version) + true + raw[PROOF_BYTES:]

    def require_sound(self) -> None:
        """After any number of connections: at most one outcome, the exact bytes or a stated error, and nothing held."""
        assert sum(self.allocated) <= max(1, SPARE * self._needed())
        assert len(self.outcomes) <= 1
        for outcome in self.outcomes:
            if isinstance(outcome, ReceivedKV):
                outcome.release()
            else:
                assert type(outcome) in STATED, repr(outcome)
        self.tickets.revoke_all()
        assert not self.memory.in_use and self.tickets.outstanding == 0

    def _needed(self) -> int:
        c = self.cache
        return ByteRanges.of(c.layout, c.tokens, c.start, c.wire).nbytes


@dataclass
class ChunkHost(Host):
    """The receiver's side of a ticket for chunks, and an engine that takes each at once. chunks: that it has taken."""

    cache: Prompt = PROMPT
    chunks: list[Chunk] = field(default_factory=list)
    arriving: ArrivingKV = field(init=False)

    def __post_init__(self) -> None:
        self.tickets = Tickets(Arenas(self._allocate))
        self.memory = Reservation(1 << 20, lambda nbytes: None)
        e = self.cache.expected
        self.arriving = ArrivingKV(
            e.head, e.tokens, e.start, arenas=self.tickets.arenas, memory=self.memory, layers=e.layers, hidden=e.hidden
        )
        self.arriving.watch(self._take)
        deadline = time.monotonic() + PATIENCE_S
        self.slot = self.tickets.issue(e, self.outcomes.append, deadline=deadline, arriving=self.arriving)

    def _take(self) -> None:
        while (chunk := self.arriving.take()) is not None:
            self.chunks.append(chunk)
            self.arriving.taken(chunk)

    def require_sound(self) -> None:
        """As above; and the chunks are those of the prompt, one after the other."""
        ends = [self.cache.start, *(chunk.end for chunk in self.chunks)]
        assert [chunk.start for chunk in self.chunks] == ends[:-1] and ends[-1] == self.arriving.whole
        self.outcomes = list(self.outcomes)  # without that of the ticket which `release` revokes
        self.arriving.release()
        super().require_sound()

    def _needed(self) -> int:
        """The arena, and what each token may need beside it: hidden states, and rows of sliding layers."""
        c = self.cache
        aside = Layout(tuple(replace(layer, kind="full", window=None) for layer in c.head.layers), c.head.dtype)
        hidden = (c.tokens - c.start) * c.expected.hidden * 4
        chunks = len(self.chunks) + 1
        return ByteRanges.of(c.head, c.tokens, c.start, c.wire).nbytes + aside.nbytes(c.tokens) + hidden + chunks * 4096


def fuzz_one(data: bytes) -> None:
    """The first byte chooses what the rest is: a stream, what follows a valid proof, or what follows a valid header;
    with a true end frame, so that the digest does not hide what comes before it; and the last two in chunks."""
    kind, rest = (data[0] % 6, data[1:]) if data else (0, b"")
    if kind >= 4:
        fuzz_chunks(rest, true=kind == 5)
        return
    host = Host()
    header = host.sent(opened(header_for(host.slot)))
    if kind == 0:
        error = host.receive(rest)
        assert error is None or type(error) in STATED, repr(error)
    elif kind == 1:
        host.receive(host.sent(opened(rest)))
    elif kind == 2:
        host.receive(header + rest)
    else:
        digest = frames.Digest()
        digest.update(rest)
        host.receive(
            header + rest + frames.encode_end(frames.TransferTotals(_count(rest), _payload(rest), digest.end()))
        )
    host.require_sound()


def fuzz_chunks(data: bytes, *, true: bool) -> None:
    """What follows a valid header of a transfer in chunks. true: with digests that are right."""
    host = ChunkHost()
    header = host.sent(opened(PROMPT.header(host.slot)), KV_CHUNKS)
    host.receive(header + (with_true_digests(data) if true else data))
    host.require_sound()


def with_true_digests(raw: bytes) -> bytes:
    """These frames, as far as they can be read, with the digests of their chunks and an end frame."""
    digest, body, at, count, nbytes = frames.Digest(), b"", 0, 0, 0
    while at + frames.FRAME.size <= len(raw):
        head = raw[at : at + frames.FRAME.size]
        kind, *_, length = frames.FRAME.unpack(head)
        payload = raw[at + len(head) : at + len(head) + length]
        at += len(head) + len(payload)
        if kind == frames.Kind.CHUNK:
            payload = digest.chunk(head)
        elif kind != frames.Kind.IDLE:
            digest.update(head)
            digest.update(payload)
            count, nbytes = count + 1, nbytes + length
        body += head + payload
    return body + frames.encode_end(frames.TransferTotals(count, nbytes % (1 << 64), digest.end()))


def seeds() -> list[bytes]:
    """Inputs to begin with: whole transfers in several chunkings."""
    host = Host()
    header = header_for(host.slot)
    size = len(opened(header))
    inputs = []
    for chunk in (1, 4, 12):
        raw = stream(header, parts_of(CACHE, chunk))
        inputs += [b"\0" + host.sent(raw), b"\1" + raw[PROOF.size :], b"\2" + raw[size:]]
        inputs.append(b"\3" + raw[size : -frames.FRAME.size - frames.TOTALS.size])
    header = PROMPT.header(host.slot)
    for chunk in (1, 4, 12):
        body = stream_of(header, frames_for(PROMPT, chunk))[len(opened(header)) :]
        inputs += [b"\4" + body, b"\5" + body[: -frames.FRAME.size - frames.TOTALS.size]]
    return inputs


def shuffled(parts: Parts, chance: random.Random) -> Parts:
    """Some frames swapped, repeated, left out, or with a changed head."""
    some = list(parts)
    for _ in range(chance.randint(1, 3)):
        i, j = chance.randrange(len(some)), chance.randrange(len(some))
        match chance.randrange(4):
            case 0:
                some[i], some[j] = some[j], some[i]
            case 1:
                some.insert(i, some[j])
            case 2 if len(some) > 1:
                some.pop(i)
            case _:
                frame, payload = some[i]
                name = chance.choice(["layer", "tensor", "start", "end", "length"])
                some[i] = (frame._replace(**{name: chance.choice([0, 1, getattr(frame, name) + 1, 60_000])}), payload)
    return some


def _heads(raw: bytes) -> list[int]:
    """The payload lengths of the frames in `raw`, as far as they can be read."""
    lengths, at = [], 0
    while at + frames.FRAME.size <= len(raw):
        kind, *_, length = frames.FRAME.unpack_from(raw, at)
        if kind != frames.Kind.IDLE:
            lengths.append(length)
        at += frames.FRAME.size + length
    return lengths


def _count(raw: bytes) -> int:
    return len(_heads(raw))


def _payload(raw: bytes) -> int:
    return sum(_heads(raw)) % (1 << 64)


def main(seconds: int) -> None:
    """Run atheris for so long; it exits with a traceback and the input at the first failure."""
    import logging
    import tempfile
    from pathlib import Path

    import atheris

    logging.disable()  # a line per input
    atheris.instrument_all()
    with tempfile.TemporaryDirectory() as corpus:
        for i, seed in enumerate(seeds()):
            (Path(corpus) / f"seed-{i}").write_bytes(seed)
        atheris.Setup(
            [sys.argv[0], f"-max_total_time={seconds}", "-max_len=16384", "-rss_limit_mb=2048", "-timeout=10", corpus],
            fuzz_one,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main(int(sys.argv[1]))
