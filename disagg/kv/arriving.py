"""KV that is used while it still arrives: the chunks of a prompt in the receiver's memory, for an engine that goes on
from each, and for one that goes on alone where the sender has failed.

Each row is received into its final place, in one arena. Beside that there is memory for what is needed for a while: the
hidden states of a chunk, until the engine has computed from them; and the rows that sliding layers keep after a chunk
but not after the whole prompt, until the next chunks have come, since the prompt can be gone on from the end of each
chunk. How much of the first there is at a time is bounded by the credit that the sender gets.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from disagg.api.layout import Layout
from disagg.errors import Cancelled, DisaggError, HandoffError, ProtocolError
from disagg.kv.arena import Arena, Arenas, Reservation
from disagg.kv.frames import Credit, Header
from disagg.kv.received import ByteRanges, ReceivedKV, Window

CREDIT_CHUNKS = 4  # with hidden states: so many may be sent beyond those that the engine has done with
WRITERS_S = 10.0  # how long another sender waits for the end of those whose transfer has failed

Outcome = Literal["complete"] | DisaggError


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Tokens [start, end), all of whose rows have arrived. hidden: the memory of their hidden states, [end - start,
    hidden] in the layout's dtype; None if none are sent."""

    start: int
    end: int
    hidden: Arena | None = None


class ArrivingKV:
    """The KV of tokens [start, tokens) of one prompt while it arrives, of the model's first `layers` layers (None: of
    all). layout: of these layers. hidden: elements of a hidden state; 0 if none are sent. Safe to use from any thread.

    kv: its memory, from the first chunk on. whole: the rows of tokens [start, whole) have arrived and are right.
    outcome: how the transfer has ended; None before.

    memory: reserved for it; in use from the first connection until `release`, and until nothing writes any more.
    """

    def __init__(
        self,
        layout: Layout,
        tokens: int,
        start: int = 0,
        *,
        arenas: Arenas,
        memory: Reservation | None = None,
        layers: int | None = None,
        hidden: int = 0,
    ) -> None:
        self.layout, self.tokens, self.start = layout, tokens, start
        self.layers, self.hidden = layers, hidden
        self.arenas = arenas
        self.kv: ReceivedKV | None = None
        self.whole = start
        self.outcome: Outcome | None = None
        self.attempt = 0  # which transfer brings it: the first, or one after `reopen`
        self._memory = memory
        self._changed = threading.Condition()
        self._chunks: deque[Chunk] = deque()  # to be taken
        self._unread = 0  # chunks whose hidden states the engine has not done with
        self._arrived = 0  # chunks of this attempt
        self._windows: deque[tuple[int, Window]] = deque()  # each with the end of its chunk
        self._reach = max((layer.window or 0 for layer in layout.layers), default=0)
        self._writers: Counter[int] = Counter()  # connections, by their attempts
        self._released = False
        self._end_use: Callable[[], None] | None = None
        self._watchers: list[Callable[[], object]] = []
        self._on_taken: Callable[[], None] = _ignore
        self._stop: Callable[[], object] = _ignore

    def take(self) -> Chunk | None:
        """The next chunk, in order; None if there is none yet, or none is left."""
        with self._changed:
            return self._chunks.popleft() if self._chunks else None

    def taken(self, chunk: Chunk) -> None:
        """The hidden states of this chunk are not read any more: their memory is free, and the sender may go on."""
        if chunk.hidden is None:
            return
        self.arenas.release(chunk.hidden)
        with self._changed:
            self._unread -= 1
            on_taken = self._on_taken
        on_taken()

    def watch(self, call: Callable[[], object]) -> None:
        """Call this, on any thread, whenever a chunk or the outcome has come; at once if some have."""
        with self._changed:
            self._watchers.append(call)
            come = bool(self._chunks) or self.outcome is not None
        if come:
            call()

    def partial(self) -> ReceivedKV | None:
        """What has come, for an engine that goes on alone: the KV of tokens [start, whole), to be used before
        `release`. None if no chunk is whole, or if a layer has a state, which comes at the end."""
        with self._changed:
            kv = self.kv
            if kv is None or kv.arena is None or self.whole == self.start:
                return None
            if self.outcome == "complete":
                return kv
            if any(layer.states for layer in self.layout.layers):
                return None
            windows = tuple(window for _, window in self._windows)
            sent = kv.start, kv.wire, kv.sender, kv.weights
            return ReceivedKV(self.layout, self.whole, kv.arena, *sent, room=self.tokens, windows=windows)

    def reopen(self) -> None:
        """Another sender goes on from `whole`, with a ticket of its own. The outcome of the transfer before it, and
        what still comes of that, is ignored."""
        with self._changed:
            self.attempt += 1
            self.outcome = None
            self._arrived = 0
            self._on_taken = self._stop = _ignore

    def fail(self, error: DisaggError) -> None:
        """It ends with this error unless it has ended: after a `reopen` no sender goes on."""
        self.end(self.attempt, error)

    def release(self, *, reuse: bool = False) -> None:
        """End everything, also a transfer that still runs, and release the memory. Safe to call twice.

        reuse: nothing reads the memory any more, so a later transfer may use it."""
        with self._changed:
            self._released = True
            kv, stop = self.kv, self._stop
            self._stop = self._on_taken = _ignore
            self._watchers.clear()
            written = self._writers.total() == 0
            unread = [chunk.hidden for chunk in self._chunks if chunk.hidden is not None]
            windows = [window.arena for _, window in self._windows] if reuse else []
            self._chunks.clear()
            self._windows.clear()
        stop()
        for arena in (*unread, *windows):
            self.arenas.release(arena)
        if kv is not None:
            kv.release(reuse=reuse and written)
        self._free()

    # For the receiver. attempt: which transfer it is; after `reopen` only the newest changes anything.

    @property
    def progress(self) -> Credit:
        """How many chunks of this attempt have arrived, and how many may be sent."""
        with self._changed:  # else a chunk that arrives now would be counted, and not that it is unread
            return Credit(self._arrived, self._arrived + max(0, CREDIT_CHUNKS - self._unread))

    def expect(self, stop: Callable[[], object]) -> None:
        """A ticket is issued for it. stop: ends that. Cancelled if it is too late."""
        with self._changed:
            self._require(self.attempt)
            self._stop = stop

    def begin(self, attempt: int, on_taken: Callable[[], None] | None = None) -> None:
        """A connection may write from now on, until `leave`. on_taken: called when more chunks may be sent, if it
        brings hidden states. Cancelled if it is too late."""
        with self._changed:
            self._require(attempt)
            if self._end_use is None and self._memory is not None:
                self._end_use = self._memory.use()
            self._on_taken = on_taken or self._on_taken
            self._writers[attempt] += 1

    def leave(self, attempt: int) -> None:
        """A connection has written its last byte."""
        with self._changed:
            self._writers[attempt] -= 1
            self._changed.notify_all()
        self._free()

    def place(self, attempt: int, header: Header) -> ReceivedKV:
        """The memory for the rows, allocated once, in the form that the header states; one call at a time. Overloaded
        if there is not enough. Connections of an earlier attempt may still write: HandoffError if they do not end."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._written_before(attempt), WRITERS_S):
                raise HandoffError("the transfer that has failed does not end", "see the decode host's log")
            kv = self.kv
        if kv is None:  # not under the lock: the engine must not wait while memory is allocated
            nbytes = ByteRanges.of(self.layout, self.tokens, self.start, header.wire).nbytes
            stated = header.wire, header.sender, header.weights
            kv = ReceivedKV(self.layout, self.tokens, self.arenas.acquire(nbytes), self.start, *stated)
            kv.return_arena, kv.on_release = self.arenas.release, self._free
        elif kv.wire != header.wire:
            raise ProtocolError(f"the KV began to come as {kv.wire}, and would go on as {header.wire}")
        with self._changed:
            self._require(attempt)
            self.kv = kv
            return kv

    def put(self, attempt: int, chunk: Chunk, window: Window | None) -> None:
        """A chunk has arrived and is right. window: what sliding layers keep after it. Cancelled if it is too late."""
        with self._changed:
            self._require(attempt)
            self._chunks.append(chunk)
            self._arrived += 1
            self._unread += chunk.hidden is not None
            self.whole = chunk.end
            if window is not None:
                self._windows.append((chunk.end, window))
            passed = []
            while self._windows and self._windows[0][0] <= chunk.end - self._reach:
                passed.append(self._windows.popleft()[1].arena)
            watchers = list(self._watchers)
        for arena in passed:
            self.arenas.release(arena)
        for call in watchers:
            call()

    def end(self, attempt: int, outcome: Outcome) -> None:
        """The transfer has ended. No effect after another outcome, `reopen` or `release`."""
        with self._changed:
            if self._released or attempt != self.attempt or self.outcome is not None:
                return
            self.outcome = outcome
            self._stop = self._on_taken = _ignore
            if outcome == "complete":
                self.whole = self.tokens
            watchers = list(self._watchers)
        for call in watchers:
            call()

    def _require(self, attempt: int) -> None:
        if self._released or attempt != self.attempt:
            raise Cancelled("the request ended before its KV was complete")

    def _written_before(self, attempt: int) -> bool:
        return not any(count for other, count in self._writers.items() if other != attempt)

    def _free(self) -> None:
        """End the use of the memory once it is released and nothing writes any more."""
        with self._changed:
            released = self._released or (self.kv is not None and self.kv.arena is None)
            if not released or self._writers.total():
                return
            end_use, self._end_use = self._end_use, None
        if end_use is not None:
            end_use()


def beside_bytes(layout: Layout, tokens: int, chunk_tokens: int, hidden: int) -> int:
    """The most memory that chunks of at most so many tokens take beside the KV of a prompt of `tokens`: hidden states
    that have not been computed from; and of sliding layers what was kept after the last chunks, and the chunk that is
    arriving."""
    states = min(tokens, CREDIT_CHUNKS * chunk_tokens) * hidden * layout.itemsize
    rows = (
        (layer, min(max(0, tokens - layer.window), layer.window + 2 * min(chunk_tokens, layer.window)))
        for layer in layout.layers
        if layer.window
    )
    return states + sum(layer.row_bytes(layout.itemsize) * count for layer, count in rows)


def _ignore() -> None:
    pass
