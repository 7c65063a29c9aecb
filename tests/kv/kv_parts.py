"""Real KV for the tests of the hand-off: layouts, random caches, their blocks, and the bytes of a whole transfer."""

from __future__ import annotations

import json
import queue
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from disagg.api.layout import LayerLayout, Layout, StateTensor, plane_bytes
from disagg.api.names import AS_IS, KV_WHOLE, WireForm
from disagg.errors import DisaggError
from disagg.kv import frames
from disagg.kv.arena import Arenas, Reservation
from disagg.kv.blocks import Block, KVBlock, StateBlock
from disagg.kv.fingerprint import Fingerprint, token_hash
from disagg.kv.outbox import frames_of
from disagg.kv.parts import WHOLE, Part
from disagg.kv.preamble import NONCE_BYTES, PROOF_BYTES, Nonces, encode_preamble, encode_proof, proof
from disagg.kv.receive import KVServer, ReceiveLimits
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import IssuedTicket, Tickets
from disagg.kv.received import ReceivedKV
from tests.deadlines import wait_until

FINGERPRINT = Fingerprint("tiny", 1000, "rope-1", "tokenizer-1", "template-1", "special-1")
PATIENCE_S = 60.0
WINDOW = 7


def mixed_layout(dtype: str = "bfloat16") -> Layout:
    """Full, sliding and state layers, and the keys of an indexer."""
    states = (StateTensor((2, 3, 5)), StateTensor((4,), "bfloat16"))
    return Layout(
        (
            LayerLayout("full", kv_heads=3, key_dim=8, value_dim=4),
            LayerLayout("sliding", kv_heads=2, key_dim=4, value_dim=4, window=WINDOW),
            LayerLayout("state", states=states),
            LayerLayout("index", kv_heads=1, key_dim=6),
        ),
        dtype,
    )


def groups_layout(dtype: str = "bfloat16") -> Layout:
    """Keys that quantise beside values that do not, both that do, keys alone, and a state."""
    return Layout(
        (
            LayerLayout("full", kv_heads=2, key_dim=64, value_dim=40),
            LayerLayout("sliding", kv_heads=1, key_dim=128, value_dim=64, window=WINDOW),
            LayerLayout("full", kv_heads=1, key_dim=192, value_dim=0),
            LayerLayout("state", states=(StateTensor((2, 3)),)),
        ),
        dtype,
    )


@dataclass(frozen=True)
class Cache:
    """Random KV: keys[l], values[l] are lists of planes, uint8 [heads, rows, row bytes]; states[l] flat uint8."""

    layout: Layout
    tokens: int
    start: int
    keys: list[Any]
    values: list[Any]
    states: list[list[Any]]
    wire: WireForm = AS_IS

    @staticmethod
    def random(layout: Layout, tokens: int, start: int = 0, seed: int = 0, wire: WireForm = AS_IS) -> Cache:
        rng = numpy.random.default_rng(seed)

        def some(*shape: int) -> Any:
            return rng.integers(0, 256, shape, numpy.uint8)

        keys: list[Any] = []
        values: list[Any] = []
        states: list[Any] = []
        for layer in layout.layers:
            rows = len(layer.rows(tokens, start))
            for side, dim in ((keys, layer.key_dim), (values, layer.value_dim)):
                side.append([some(layer.kv_heads, rows, size) for size in plane_bytes(dim, layout.itemsize, wire)])
            states.append([some(state.nbytes) for state in layer.states] if tokens > start else [])
        return Cache(layout, tokens, start, keys, values, states, wire)

    def blocks(self, chunk: int = 4, part: Part = WHOLE) -> Iterator[Block]:
        """As a prefill emits them: chunk by chunk, layer by layer, states after the last chunk."""
        for begin in range(self.start, self.tokens, chunk):
            for index, layer in enumerate(self.layout.layers):
                rows = layer.rows(self.tokens, self.start)
                first, last = max(begin, rows.start), min(begin + chunk, self.tokens)
                heads = part.heads_of(self.layout, index)
                if heads and first < last:
                    some = slice(first - rows.start, last - rows.start)
                    keys, values = (
                        [plane[head][some].reshape(-1).data for plane in planes for head in heads]
                        for planes in (self.keys[index], self.values[index])
                    )
                    yield KVBlock(index, first, last, keys, values)
        for index, states in enumerate(self.states):
            if states and part.has_states(self.layout, index):
                yield StateBlock(index, [state.data for state in states])

    def matches(self, kv: ReceivedKV) -> bool:
        mine = self.flat()
        theirs = [array for arrays in (*kv.keys, *kv.values, *kv.states) for array in arrays]
        return len(mine) == len(theirs) and all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))

    def flat(self) -> list[Any]:
        """Every array: of the keys, the values, the states."""
        return [array for arrays in (*self.keys, *self.values, *self.states) for array in arrays]


def expected(cache: Cache, request_id: str = "r1", tokens: list[int] | None = None) -> Expected:
    ids = tokens or list(range(cache.tokens))
    return Expected(
        request_id, cache.layout, FINGERPRINT, token_hash(ids), cache.tokens, cache.start, wires=(cache.wire,)
    )


def header_for(slot: IssuedTicket, **changes: Any) -> frames.Header:
    e = slot.expected
    header = frames.Header(
        slot.ticket, e.request_id, e.fingerprint, e.layout, e.token_hash, e.tokens, e.start, e.wires[0]
    )
    return replace(header, **changes)


Parts = list[tuple[frames.Frame, bytes]]


def parts_of(cache: Cache, chunk: int = 4, part: Part = WHOLE) -> Parts:
    """The data frames of a transfer as (head, payload), to be damaged at will."""
    return [
        (frame, b"".join(views))
        for block in cache.blocks(chunk, part)
        for frame, views in frames_of(block, cache.layout, cache.wire, part)
    ]


def stream(header: frames.Header, parts: Parts) -> bytes:
    """All that a sender sends after its preamble, with an end frame that is true for `parts`; see `opened`."""
    body = b"".join(frames.encode_frame(frame) + payload for frame, payload in parts)
    digest = frames.Digest()
    digest.update(body)
    totals = frames.TransferTotals(len(parts), sum(len(payload) for _, payload in parts), digest.end())
    return opened(header) + body + frames.encode_end(totals)


def opened(header: frames.Header | bytes) -> bytes:
    """Proof and header. The place of the proof is empty: `introduce` fills it in."""
    raw = header if isinstance(header, bytes) else frames.encode_header(header)
    return encode_proof(bytes(PROOF_BYTES), len(raw)) + raw


def introduce(sock: socket.socket, ticket: str, raw: bytes, version: int = KV_WHOLE) -> list[dict[str, Any]]:
    """Send a preamble that names the ticket, then `raw` with its proof (see `opened`). Returns the reply that refuses
    the ticket, if there is one."""
    nonce = bytes(range(NONCE_BYTES))
    sock.sendall(encode_preamble(ticket, nonce, version))
    reply = read_reply(sock)
    if not reply["ok"]:
        return [reply]
    nonces = Nonces(nonce, frames.decode_identity(reply)[0], version)
    sock.sendall(proof(ticket, "sender", nonces) + raw[PROOF_BYTES:])
    return []


@dataclass
class Receiver:
    """A KVServer with the owner's side of it."""

    server: KVServer
    tickets: Tickets
    results: dict[str, queue.Queue[ReceivedKV | DisaggError]] = field(default_factory=dict)
    reservations: list[Reservation] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Reserved bytes that a transfer or received KV uses."""
        return sum(memory.nbytes for memory in self.reservations if memory.in_use)

    def issue(self, cache: Cache, request_id: str = "r1", *, lasts_s: float = PATIENCE_S) -> IssuedTicket:
        results: queue.Queue[ReceivedKV | DisaggError] = queue.Queue()
        memory = Reservation(cache.layout.nbytes(cache.tokens, cache.start, cache.wire), lambda nbytes: None)
        self.reservations.append(memory)
        deadline = time.monotonic() + lasts_s
        slot = self.tickets.issue(expected(cache, request_id), results.put, deadline=deadline, memory=memory)
        self.results[slot.ticket] = results
        return slot

    def result(self, slot: IssuedTicket) -> ReceivedKV | DisaggError:
        return self.results[slot.ticket].get(timeout=PATIENCE_S)

    def dial(self) -> socket.socket:
        return socket.create_connection((self.server.host, self.server.port), timeout=PATIENCE_S)

    def exchange(
        self, raw: bytes, ticket: str = "", *, hang_up: bool = False, version: int = KV_WHOLE
    ) -> list[dict[str, Any]]:
        """Send `raw`, with a ticket after `introduce`, then (hang_up) close this end: the replies to `raw`."""
        with self.dial() as sock:
            refused: list[dict[str, Any]] = []
            try:
                if ticket:
                    refused = introduce(sock, ticket, raw, version)
                else:
                    sock.sendall(raw)
                if hang_up:
                    sock.shutdown(socket.SHUT_WR)
            except OSError:  # refused while it sends: the reply is still to be read
                pass
            return refused + read_replies(sock)

    def settled(self) -> bool:
        return self.held_bytes == 0 and self.server.connections == 0

    def require_serving(self) -> None:
        """Nothing is held, and a good transfer is taken as ever."""
        wait_until(self.settled)
        cache = Cache.random(mixed_layout(), 9, seed=99)
        slot = self.issue(cache, "good")
        replies = self.exchange(stream(header_for(slot), parts_of(cache)), slot.ticket)
        assert [reply["ok"] for reply in replies] == [True, True]
        kv = self.result(slot)
        assert isinstance(kv, ReceivedKV) and cache.matches(kv)
        kv.release()
        wait_until(self.settled)


def start_receiver(limits: ReceiveLimits | None = None) -> Receiver:
    tickets = Tickets(Arenas(keep_bytes=1 << 24))
    return Receiver(KVServer("127.0.0.1", 0, tickets, limits or ReceiveLimits(linger_s=0.5, stall_s=30.0)), tickets)


def read_reply(sock: socket.socket) -> dict[str, Any]:
    """The next reply. Raises ConnectionError if the other end closes before it."""
    size = frames.decode_reply_length(_read(sock, frames.REPLY_LENGTH.size))
    reply: dict[str, Any] = json.loads(_read(sock, size))
    return reply


def _read(sock: socket.socket, size: int) -> bytes:
    raw = b""
    while len(raw) < size:
        if not (piece := sock.recv(size - len(raw))):
            raise ConnectionError("closed before the reply")
        raw += piece
    return raw


def read_replies(sock: socket.socket) -> list[dict[str, Any]]:
    """Every reply until the other end closes; a reset after the last one counts as closing."""
    raw = b""
    try:
        while piece := sock.recv(1 << 16):
            raw += piece
    except ConnectionError:
        pass
    replies = []
    while raw:
        size = frames.decode_reply_length(raw[: frames.REPLY_LENGTH.size])
        replies.append(json.loads(raw[frames.REPLY_LENGTH.size :][:size]))
        raw = raw[frames.REPLY_LENGTH.size + size :]
    return replies
