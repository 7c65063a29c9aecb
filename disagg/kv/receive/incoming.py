"""The KV that arrives for one ticket: which transfer it allows, its memory, and which of its parts have come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from disagg.api.layout import Layout
from disagg.api.names import AS_IS, WireForm
from disagg.errors import Cancelled, FingerprintMismatch, LayoutMismatch, ProtocolError, TicketRefused
from disagg.kv.arena import Arenas, Reservation
from disagg.kv.fingerprint import Fingerprint
from disagg.kv.frames import Header
from disagg.kv.parts import Coverage
from disagg.kv.received import ByteRanges, ReceivedKV, ReceiveTiming


@dataclass(frozen=True, slots=True)
class Expected:
    """The one transfer that a ticket allows. It is the KV of tokens [start, tokens) of this prompt on this model, in
    one of the forms `wires`."""

    request_id: str
    layout: Layout
    fingerprint: Fingerprint
    token_hash: str
    tokens: int
    start: int = 0
    wires: tuple[WireForm, ...] = (AS_IS,)

    def require(self, header: Header) -> None:
        """Raise an error that names the first field in which the header differs."""
        self.layout.require_same(header.layout, mine="decode", theirs="prefill")
        if header.wire not in self.wires:
            raise LayoutMismatch(
                f"the prefill host would send the KV as {header.wire}, this ticket allows {' or '.join(self.wires)}",
                "take kv_wire out of the prefill host's engine options, or install the same disagg on both hosts",
            )
        self.fingerprint.require_same(header.fingerprint, mine="decode", theirs="prefill")
        if (self.tokens, self.token_hash) != (header.tokens, header.token_hash):
            raise FingerprintMismatch(
                f"the hosts tokenised the prompt differently (token_hash: "
                f"decode {self.token_hash[:16]} of {self.tokens} tokens, "
                f"prefill {header.token_hash[:16]} of {header.tokens})",
                "put the same tokenizer files and chat template on both hosts",
            )
        if self.start != header.start or self.request_id != header.request_id:
            raise ProtocolError(
                f"the transfer is for request {header.request_id} from token {header.start} on, "
                f"the ticket for request {self.request_id} from token {self.start} on"
            )


class Incoming:
    """The KV of one ticket while it arrives. One thread per connection uses it: each joins with its part, fills its
    share of `kv`, completes and leaves.

    The reserved memory is in use from the moment that the first part joins. If the ticket ends without its KV, the use
    ends when the last connection has left, because until then a connection may still write.
    """

    def __init__(self, expected: Expected, memory: Reservation | None, arenas: Arenas) -> None:
        self._expected = expected
        self._memory = memory
        self._arenas = arenas
        self._lock = threading.Lock()
        self._coverage = Coverage(expected.layout)
        self._first: Header | None = None  # of the parts that joined
        self._joined = 0
        self._completed: list[ReceiveTiming] = []
        self._connections = 0
        self._ended = False
        self._end_use: Callable[[], None] | None = None
        self._kv: ReceivedKV | None = None

    @property
    def full(self) -> bool:
        """Whether every part has joined: the ticket is used up."""
        return self._first is not None and self._joined == self._first.parts

    def join(self, header: Header) -> None:
        """Take part with an accepted header. TicketRefused if every part has joined; ProtocolError if the part does not
        fit the earlier ones; Cancelled if the ticket has ended."""
        with self._lock:
            if self.full:
                raise TicketRefused("every part of this KV transfer has already come", "send each part once")
            if self._ended:
                raise Cancelled("the KV transfer had ended before this part came")
            first = self._first or header
            if (header.parts, header.wire) != (first.parts, first.wire):
                raise ProtocolError(
                    f"one part states {first.parts} parts in the form {first.wire}, another {header.parts} in the form "
                    f"{header.wire}"
                )
            self._coverage.add(header.part)
            if self._joined + 1 == header.parts:
                self._coverage.require_complete()
            if self._first is None and self._memory is not None:
                self._end_use = self._memory.use()
            self._first = first
            self._joined += 1
            self._connections += 1

    def kv(self) -> ReceivedKV:
        """The KV in memory, allocated for the first part that needs it. Overloaded if there is not enough memory."""
        with self._lock:
            assert self._first is not None, "join comes first"
            if self._kv is None:
                e, wire = self._expected, self._first.wire
                arena = self._arenas.acquire(ByteRanges.of(e.layout, e.tokens, e.start, wire).nbytes)
                stated = self._first
                self._kv = ReceivedKV(e.layout, e.tokens, arena, e.start, wire, stated.sender, stated.weights)
                self._kv.return_arena = self._arenas.release
            return self._kv

    def complete(self, timing: ReceiveTiming) -> ReceivedKV | None:
        """A part is whole. Returns the KV, whose release ends the use of its memory, if it was the last part. Cancelled
        if the ticket has ended."""
        with self._lock:
            if self._ended:
                raise Cancelled("the request ended before its KV was complete")
            assert self._first is not None and self._kv is not None, "join comes first"
            self._completed.append(timing)
            if len(self._completed) < self._first.parts:
                return None
            self._kv.timing = ReceiveTiming(
                claimed=min(one.claimed for one in self._completed),
                first_byte=min(one.first_byte for one in self._completed),
                last_byte=max(one.last_byte for one in self._completed),
                accepted=timing.accepted,
            )
            kv, self._kv = self._kv, None
            kv.on_release, self._end_use = self._end_use, None
            return kv

    def leave(self) -> None:
        """A connection no longer touches the memory."""
        with self._lock:
            self._connections -= 1
            self._free()

    def end(self) -> None:
        """The ticket has ended without its KV."""
        with self._lock:
            self._ended = True
            self._free()

    def _free(self) -> None:
        if self._ended and self._connections == 0:
            self._kv = None
            if self._end_use is not None:
                self._end_use()
                self._end_use = None
