"""A prompt whose KV comes in chunks: all rows of every layer, hidden states and blocks, and the receiver's side."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy

from disagg.api.layout import Layout, SplitLayout, plane_bytes
from disagg.api.names import AS_IS, WireForm
from disagg.errors import DisaggError
from disagg.kv import frames
from disagg.kv.arena import Arenas, Reservation
from disagg.kv.arriving import ArrivingKV, Chunk
from disagg.kv.blocks import Block, ChunkEnd, HiddenBlock, KVBlock, StateBlock
from disagg.kv.fingerprint import token_hash
from disagg.kv.outbox import frames_of
from disagg.kv.parts import WHOLE, Part
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import IssuedTicket, KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from tests.kv.kv_parts import FINGERPRINT, PATIENCE_S, mixed_layout, opened

HIDDEN = 6
LAYOUT = mixed_layout("float32")
SPLIT = SplitLayout(layers=8, places=(0, 2, 4, 6), hidden=HIDDEN)  # every other layer keeps something
HEAD = 4  # of the model's layers: the head has the first two of the layout


@dataclass(frozen=True)
class Prompt:
    """Tokens [start, tokens) with random rows of every token. layers: of the head; None: all, without hidden states.
    keys, values: per layer of the head its planes, uint8 [heads, tokens - start, row bytes]. hidden: uint8 [tokens -
    start, bytes of a hidden state], finite numbers."""

    tokens: int
    start: int
    layers: int | None
    layout: Layout
    split: SplitLayout
    keys: list[Any]
    values: list[Any]
    states: list[list[Any]]
    hidden: Any
    wire: WireForm = AS_IS

    @staticmethod
    def random(
        tokens: int,
        start: int = 0,
        layers: int | None = HEAD,
        *,
        layout: Layout = LAYOUT,
        split: SplitLayout = SPLIT,
        wire: WireForm = AS_IS,
        seed: int = 0,
    ) -> Prompt:
        rng = numpy.random.default_rng(seed)
        head = layout if layers is None else split.head(layout, layers)

        def some(*shape: int) -> Any:
            return rng.integers(0, 256, shape, numpy.uint8)

        def planes(heads: int, dim: int) -> list[Any]:
            return [some(heads, tokens - start, size) for size in plane_bytes(dim, layout.itemsize, wire)]

        keys = [planes(layer.kv_heads, layer.key_dim) for layer in head.layers]
        values = [planes(layer.kv_heads, layer.value_dim) for layer in head.layers]
        states = [[some(state.nbytes) for state in layer.states if tokens > start] for layer in head.layers]
        numbers: Any = rng.standard_normal((tokens - start, split.hidden), numpy.float32)
        if layout.dtype == "float16":
            numbers = numbers.astype("<f2")
        elif layout.dtype == "bfloat16":
            numbers = (numbers.view("<u4") >> 16).astype("<u2")
        hidden = numbers.view(numpy.uint8)
        return Prompt(tokens, start, layers, layout, split, keys, values, states, hidden, wire)

    @property
    def expected(self) -> Expected:
        return Expected(
            "r1",
            self.layout,
            FINGERPRINT,
            token_hash(range(self.tokens)),
            self.tokens,
            self.start,
            wires=(self.wire,),
            layers=self.layers,
            split=self.split,
            chunks=True,
        )

    @property
    def head(self) -> Layout:
        return self.expected.head

    def header(self, slot: IssuedTicket | None = None, **changes: Any) -> frames.Header:
        e = slot.expected if slot is not None else self.expected
        header = frames.Header(
            slot.ticket if slot is not None else "ticket",
            e.request_id,
            e.fingerprint,
            e.head,
            e.token_hash,
            e.tokens,
            e.start,
            e.wires[0],
            chunks=True,
            layers=e.layers,
            hidden=e.hidden,
        )
        return replace(header, **changes)

    def blocks(self, chunk: int = 5, start: int | None = None, part: Part = WHOLE) -> Iterator[Block]:
        """As a head emits them, from token `start` on: the rows of each layer of a chunk, its hidden states, its
        end; states after the last chunk."""
        for begin in range(self.start if start is None else start, self.tokens, chunk):
            yield from self.chunk(begin, min(begin + chunk, self.tokens), part)
        for index, states in enumerate(self.states):
            if states and part.has_states(self.head, index):
                yield StateBlock(index, [state.data for state in states])

    def chunk(self, begin: int, end: int, part: Part = WHOLE) -> Iterator[Block]:
        for index, layer in enumerate(self.head.layers):
            rows, heads = layer.rows(end, begin), part.heads_of(self.head, index)
            if rows and heads:
                some = slice(rows.start - self.start, rows.stop - self.start)
                keys, values = (
                    [plane[head, some].reshape(-1).data for plane in planes for head in heads]
                    for planes in (self.keys[index], self.values[index])
                )
                yield KVBlock(index, rows.start, rows.stop, keys, values)
        if self.expected.hidden and part.hidden:
            rows = self.hidden[begin - self.start : end - self.start]
            yield HiddenBlock(begin, end, rows.reshape(-1).data)
        yield ChunkEnd(begin, end)

    def matches(self, kv: ReceivedKV) -> bool:
        """Whether these are the rows that every layer keeps after `kv.tokens` tokens."""
        for index, layer in enumerate(self.head.layers):
            pieces = kv.rows(index)
            wanted = [row for piece in pieces for row in piece.wanted]
            assert wanted == list(layer.rows(kv.tokens, kv.start))
            for planes, name in ((self.keys[index], "keys"), (self.values[index], "values")):
                for number, plane in enumerate(planes):
                    for piece in pieces:
                        raw = numpy.frombuffer(piece.memory, numpy.uint8)[getattr(piece, name)[number]]
                        there = raw.reshape(plane.shape[0], len(piece.stored), plane.shape[2])
                        at = slice(piece.wanted.start - piece.stored.start, piece.wanted.stop - piece.stored.start)
                        mine = slice(piece.wanted.start - self.start, piece.wanted.stop - self.start)
                        if there[:, at].tobytes() != plane[:, mine].tobytes():
                            return False
        if kv.tokens < self.tokens:
            return True
        sent, come = ([state.tobytes() for states in all_ for state in states] for all_ in (self.states, kv.states))
        return sent == come

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk's hidden states are the prompt's."""
        if chunk.hidden is None:
            return not self.expected.hidden
        mine = self.hidden[chunk.start - self.start : chunk.end - self.start]
        return bool(chunk.hidden.data[: mine.nbytes].tobytes() == mine.tobytes())


@dataclass
class Awaited:
    """A ticket for a prompt, and where its KV arrives. Allocations are counted in `memory`."""

    prompt: Prompt
    tickets: Tickets
    arriving: ArrivingKV
    memory: Reservation
    _slot: IssuedTicket | None
    outcomes: queue.Queue[KVOutcome]

    on_failure: Callable[[Awaited], None] | None = None

    @staticmethod
    def by(
        tickets: Tickets,
        prompt: Prompt,
        *,
        arenas: Arenas | None = None,
        on_failure: Callable[[Awaited], None] | None = None,
    ) -> Awaited:
        """on_failure: what the server does before the engine hears of it."""
        e = prompt.expected
        memory = Reservation(1 << 20, lambda nbytes: None)
        arriving = ArrivingKV(
            e.head, e.tokens, e.start, arenas=arenas or tickets.arenas, memory=memory, layers=e.layers, hidden=e.hidden
        )
        awaited = Awaited(prompt, tickets, arriving, memory, None, queue.Queue(), on_failure)
        awaited._issue()
        return awaited

    def again(self) -> None:
        """A new ticket, for another sender that goes on."""
        self.arriving.reopen()
        self._issue()

    def _issue(self) -> None:
        e = replace(self.prompt.expected, start=self.arriving.whole)
        deadline = time.monotonic() + PATIENCE_S
        self._slot = self.tickets.issue(e, self._settle, deadline=deadline, arriving=self.arriving)

    def _settle(self, outcome: KVOutcome) -> None:
        if isinstance(outcome, DisaggError) and self.on_failure is not None:
            self.on_failure(self)
        self.outcomes.put(outcome)

    @property
    def slot(self) -> IssuedTicket:
        assert self._slot is not None
        return self._slot

    def take_all(self) -> list[Chunk]:
        """The chunks that have come, as an engine takes them, each checked."""
        taken: list[Chunk] = []
        while (chunk := self.arriving.take()) is not None:
            assert self.prompt.has(chunk)
            self.arriving.taken(chunk)
            taken.append(chunk)
        return taken

    def outcome(self) -> ReceivedKV | DisaggError:
        return self.outcomes.get(timeout=PATIENCE_S)


Parts = list[tuple[frames.Frame, bytes]]


def frames_for(prompt: Prompt, chunk: int = 5, part: Part = WHOLE) -> Parts:
    """The frames of a transfer as (head, payload), to be damaged at will. `stream_of` fills in the chunks' digests."""
    header = prompt.header(part=part)
    return [
        (frame, b"".join(views))
        for block in prompt.blocks(chunk, header.start, header.part)
        for frame, views in frames_of(block, header.layout, header.wire, header.part, header.hidden_bytes)
    ]


def stream_of(header: frames.Header, parts: Parts) -> bytes:
    """All that a sender sends after its preamble, with digests and an end frame that are true for `parts`; a chunk
    frame that has a payload keeps it."""
    digest, body, count, nbytes = frames.Digest(), b"", 0, 0
    for frame, payload in parts:
        head = frames.encode_frame(frame)
        if frame.kind is frames.Kind.CHUNK:
            true = digest.chunk(head)
            body += head + (payload or true)
            continue
        digest.update(head)
        digest.update(payload)
        body += head + payload
        count, nbytes = count + 1, nbytes + len(payload)
    return opened(header) + body + frames.encode_end(frames.TransferTotals(count, nbytes, digest.end()))
