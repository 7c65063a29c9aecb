"""The KV that arrives for one ticket: which transfer it allows, its memory, and which of its parts have come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from disagg.api.layout import Layout, SplitLayout
from disagg.api.names import AS_IS, WireForm
from disagg.errors import Cancelled, DisaggError, FingerprintMismatch, LayoutMismatch, ProtocolError, TicketRefused
from disagg.kv.arena import Arenas, Reservation
from disagg.kv.arriving import ArrivingKV
from disagg.kv.fingerprint import Fingerprint
from disagg.kv.frames import Header, carries_hidden
from disagg.kv.parts import Coverage
from disagg.kv.receive.chunks import Chunks
from disagg.kv.received import ReceivedKV, ReceiveTiming


@dataclass(frozen=True, slots=True)
class Expected:
    """The one transfer that a ticket allows. It is the KV of tokens [start, tokens) of this prompt on this model, in
    one of the forms `wires`.

    layers: of the model's first so many layers only, for a `split` of it; None: of all. chunks: it may come in chunks.
    """

    request_id: str
    layout: Layout
    fingerprint: Fingerprint
    token_hash: str
    tokens: int
    start: int = 0
    wires: tuple[WireForm, ...] = (AS_IS,)
    layers: int | None = None
    split: SplitLayout | None = None
    chunks: bool = False

    @property
    def head(self) -> Layout:
        """The layout of what is transferred: of the layers that the sender computes."""
        if self.layers is None or self.split is None:
            return self.layout
        return self.split.head(self.layout, self.layers)

    @property
    def hidden(self) -> int:
        """Elements of one token's hidden state; 0 if none are sent, since the sender computes all layers."""
        if self.layers is None or self.split is None or self.layers >= self.split.layers:
            return 0
        return self.split.hidden

    def require(self, header: Header) -> None:
        """Raise an error that names the first field in which the header differs."""
        if header.layers != self.layers or header.hidden != self.hidden:
            raise LayoutMismatch(
                f"the prefill host would send {_what(header.layers, header.hidden)}, "
                f"this ticket is for {_what(self.layers, self.hidden)}",
                "install the same disagg on both hosts, and serve the same model",
            )
        if header.chunks and not self.chunks:
            raise ProtocolError("the prefill host would send the KV in chunks, this ticket is for KV that is not")
        self.head.require_same(header.layout, mine="decode", theirs="prefill")
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
    share of the memory, completes and leaves.

    arriving: where it arrives. None: the KV is of use once all of it has come, and is released if that fails.
    """

    def __init__(
        self, expected: Expected, memory: Reservation | None, arenas: Arenas, arriving: ArrivingKV | None = None
    ) -> None:
        e = expected
        self._expected = expected
        self._owned = arriving is None
        self.arriving = arriving or ArrivingKV(
            e.head, e.tokens, e.start, arenas=arenas, memory=memory, layers=e.layers, hidden=e.hidden
        )
        self.attempt = self.arriving.attempt
        self._lock = threading.Lock()
        self._coverage = Coverage(e.head, hidden=e.hidden > 0)
        self._first: Header | None = None  # of the parts that joined
        self._joined = 0
        self._completed: list[ReceiveTiming] = []
        self._ended = False
        self._chunks: Chunks | None = None

    @property
    def full(self) -> bool:
        """Whether every part has joined: the ticket is used up."""
        return self._first is not None and self._joined == self._first.parts

    def join(self, header: Header, on_taken: Callable[[], None] | None = None) -> None:
        """Take part with an accepted header. on_taken: see `ArrivingKV.begin`. TicketRefused if every part has joined;
        ProtocolError if the part does not fit the earlier ones; Cancelled if the ticket has ended."""
        with self._lock:
            if self.full:
                raise TicketRefused("every part of this KV transfer has already come", "send each part once")
            if self._ended:
                raise Cancelled("the KV transfer had ended before this part came")
            first = self._first or header
            if (header.parts, header.wire, header.chunks) != (first.parts, first.wire, first.chunks):
                raise ProtocolError(
                    f"one part states {_form(first)}, another {_form(header)}",
                )
            self._coverage.add(header.part)
            if self._joined + 1 == header.parts:
                self._coverage.require_complete()
            self.arriving.begin(self.attempt, on_taken if carries_hidden(header) else None)
            self._first = first
            self._joined += 1

    def kv(self) -> ReceivedKV:
        """The KV in memory, allocated for the first part that needs it. Overloaded if there is not enough memory."""
        with self._lock:
            assert self._first is not None, "join comes first"
            return self.arriving.place(self.attempt, self._first)

    def chunks(self) -> Chunks:
        """The chunks of all parts."""
        with self._lock:
            assert self._first is not None, "join comes first"
            self._chunks = self._chunks or Chunks(self.arriving, self.attempt, self._first)
            return self._chunks

    def complete(self, timing: ReceiveTiming) -> ReceivedKV | None:
        """A part is whole. Returns the KV if it was the last part. Cancelled if the ticket has ended."""
        with self._lock:
            kv = self.arriving.kv
            if self._ended or kv is None:
                raise Cancelled("the request ended before its KV was complete")
            assert self._first is not None, "join comes first"
            self._completed.append(timing)
            if len(self._completed) < self._first.parts:
                return None
            kv.timing = ReceiveTiming(
                claimed=min(one.claimed for one in self._completed),
                first_byte=min(one.first_byte for one in self._completed),
                last_byte=max(one.last_byte for one in self._completed),
                accepted=timing.accepted,
            )
            return kv

    def leave(self) -> None:
        """A connection no longer touches the memory."""
        self.arriving.leave(self.attempt)

    def end(self, error: DisaggError | None = None) -> None:
        """The ticket has ended: with all its KV, or with this error."""
        with self._lock:
            self._ended = True
        if error is None:
            self.arriving.end(self.attempt, "complete")
        elif self._owned:
            self.arriving.release()
        else:
            self.arriving.end(self.attempt, error)


def _form(header: Header) -> str:
    chunks = " in chunks" if header.chunks else ""
    return f"{header.parts} parts in the form {header.wire}{chunks}"


def _what(layers: int | None, hidden: int) -> str:
    of = "all layers" if layers is None else f"layers [0, {layers})"
    return f"{of}, with hidden states of {hidden} elements" if hidden else of
