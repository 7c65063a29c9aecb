"""The slot of a request at its decode host, in which its KV arrives, with a ticket for whoever sends it.

A prefill host that fails in mid-prompt leaves the KV of whole chunks: another prefill host goes on after them if that
is expected to be quicker than this host, else this host does. That is decided before the engine learns of the failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from disagg import logs
from disagg.api.events import MAX_REASON_CHARS, Event, LocalEvent, SlotEvent
from disagg.api.names import KV_CHUNKS, KV_WHOLE, WIRE_FORMS
from disagg.api.requests import KVAddress
from disagg.engines.base import EngineInfo
from disagg.errors import Cancelled, DisaggError, PeerLost
from disagg.kv.arena import Reservation
from disagg.kv.arriving import ArrivingKV
from disagg.kv.fingerprint import token_hash
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import IssuedTicket, KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from disagg.servers.decode.spans import Spans, sooner
from disagg.servers.host.admission import Turns
from disagg.servers.host.request import ActiveRequest


@dataclass(frozen=True, slots=True)
class SlotWaits:
    """In seconds. unused_s: a slot whose ticket no prefill host has used by then is closed, unless its caller extends a
    lease: its KV memory may be needed by others. A caller with a lease ends its request if no KV comes, and knows when
    its prompt is in a queue. next_s: the least that a prefill host which goes on for another has until its transfer
    begins; else as long as all of the prompt was expected to take there."""

    unused_s: float = 120.0
    next_s: float = 2.0


@dataclass(frozen=True, slots=True)
class SlotTerms:
    """What arrives in a slot, and what else could be done. start: of the first token whose KV is due. spans: who
    computes which layers. chunks: the sender can send chunk by chunk. here_s, elsewhere_s: seconds in which this host,
    and another prefill host, would compute all that is due; None if that is not known, or there is none."""

    start: int
    spans: Spans
    chunks: bool = False
    here_s: float | None = None
    elsewhere_s: float | None = None

    def other_head(self, left: float) -> bool:
        """Whether another prefill host is expected to be quicker than this host with what is left, a share of all."""
        if self.elsewhere_s is None or left == 0:
            return False
        whole_s = self.elsewhere_s * self.spans.layers / self.spans.of  # it begins with the first token
        return self.here_s is None or whole_s < left * self.here_s


class Slots:
    """Admits at most `limit` requests to wait for KV at the same time. Others keep their places and wait for their
    turns."""

    def __init__(self, tickets: Tickets, address: KVAddress, limit: int, waits: SlotWaits) -> None:
        self._tickets = tickets
        self._address = address
        self._turns = Turns(limit)
        self._waits = waits

    async def open(
        self, request: ActiveRequest, info: EngineInfo, terms: SlotTerms, memory: Reservation | None
    ) -> OpenSlot:
        """A slot for the KV of tokens [terms.start, all but the last), which comes into `memory`. It ends with the
        request at the latest."""
        cleanup = ExitStack()
        turn = self._turns.take(request.share, cleanup)
        await request.within_deadline(turn, "there was no free slot for its KV")
        request.cleanup.callback(cleanup.close)
        place = SlotPlace(self._tickets, self._address, cleanup, self._waits)
        return OpenSlot(request, info, terms, memory, place)


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Of one slot among all. cleanup: gives it back."""

    tickets: Tickets
    address: KVAddress
    cleanup: ExitStack
    waits: SlotWaits


class OpenSlot:
    """A slot of one request. event: what its caller is sent. arriving: what has come.

    resumed: tokens whose KV had come when the last prefill host failed, after which this host goes on; None: it did not
    fail. ended: time.monotonic() at the end of the transfer. only_sender: no other prefill host may go on.
    """

    def __init__(
        self,
        request: ActiveRequest,
        info: EngineInfo,
        terms: SlotTerms,
        memory: Reservation | None,
        place: SlotPlace,
    ) -> None:
        self._request, self._terms, self._place, self._tickets = request, terms, place, place.tickets
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._news: asyncio.Queue[Event] = asyncio.Queue()  # two at most
        self._hash = token_hash(request.tokens)
        self._info = info
        self.senders = 1
        self.resumed: int | None = None
        self.ended = 0.0
        self.only_sender = False
        self._closed = False
        layers, split = (terms.spans.layers if terms.spans.divided else None), info.split
        self.arriving = ArrivingKV(
            info.layout if layers is None else split.head(info.layout, layers),
            len(request.tokens) - 1,
            terms.start,
            arenas=place.tickets.arenas,
            memory=memory,
            layers=layers,
            hidden=0 if layers is None else split.hidden,
        )
        request.cleanup.callback(self.arriving.release)
        self._slot = self._issue()
        request.cleanup.callback(self._close)
        self.event = self._opened(self._slot)
        self.arriving.watch(self._come)

    async def received(self, sender: str) -> AsyncGenerator[Event, None]:
        """Wait until the engine can begin, for the first chunk of a divided prompt, else for all. Yields what its
        caller is told meanwhile. sender: whose the KV is, by the caller; "" if that does not say.

        Raises the transfer's error if nothing has come that is of use, PeerLost if the request has no lease and no
        transfer begins in unused_s, and DeadlineExceeded at its deadline."""
        work = asyncio.ensure_future(self._begun())
        async with aclosing(meanwhile(work, self)) as told:
            async for event in told:
                yield event
        work.result()
        if (kv := self.arriving.kv) is not None:
            kv.sender = "" if self.senders > 1 else sender or kv.sender

    @property
    def news(self) -> asyncio.Queue[Event]:
        """What its caller is to be told."""
        return self._news

    async def _begun(self) -> None:
        await self._request.within_deadline(self._wait(), "the KV had not arrived")
        outcome = self.arriving.outcome
        if isinstance(outcome, DisaggError) and not self._goes_on:
            raise outcome

    @property
    def _enough(self) -> bool:
        arriving = self.arriving
        return arriving.outcome is not None or (self._terms.spans.divided and arriving.whole > arriving.start)

    async def _wait(self) -> None:
        unused_s = self._place.waits.unused_s
        unused = inf if self._request.leased else time.monotonic() + unused_s
        while not self._enough:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if unused == inf else unused - time.monotonic()):
                    await self._changed.wait()
            if time.monotonic() >= unused and not self._enough:
                if self._slot.state == "issued":
                    text = f"no prefill host has sent KV within {unused_s:g} s"
                    raise PeerLost(text, "see the log of the prefill host")
                unused = inf

    def _issue(self) -> IssuedTicket:
        """A ticket for what has not come yet."""
        arriving, terms, info = self.arriving, self._terms, self._info
        expected = Expected(
            request_id=self._request.id,
            layout=info.layout,
            fingerprint=info.fingerprint,
            token_hash=self._hash,
            tokens=arriving.tokens,
            start=arriving.whole,
            wires=(arriving.kv.wire,) if arriving.kv is not None else WIRE_FORMS,
            layers=arriving.layers,
            split=info.split,
            chunks=terms.chunks,
        )
        return self._tickets.issue(
            expected,
            self._settled,
            deadline=self._request.deadline,
            elsewhere_s=sooner(terms.here_s, terms.elsewhere_s),
            arriving=arriving,
        )

    def _opened(self, slot: IssuedTicket) -> SlotEvent:
        """The event that states this ticket; the wait for its KV begins."""
        request = self._request
        request.slot, request.slot_sent = slot, time.monotonic()
        if self.arriving.whole == self.arriving.start:
            request.phase = "waiting for KV"
        return SlotEvent(
            request_id=request.id,
            ticket=slot.ticket,
            kv=self._place.address,
            prompt_tokens=request.prompt_tokens,
            held_tokens=slot.expected.start,
            layers=self.arriving.layers,
            kv_version=KV_CHUNKS if self._terms.chunks else KV_WHOLE,
            kv_wire=self.arriving.kv.wire if self.arriving.kv is not None else None,
            reason=self._terms.spans.reason[:MAX_REASON_CHARS],
        )

    def _settled(self, outcome: KVOutcome) -> None:
        """A transfer has ended, on any thread, and the engine does not know it yet."""
        arriving = self.arriving
        if isinstance(outcome, ReceivedKV | Cancelled) or self._closed or self.only_sender or self.senders > 1:
            return
        left = (arriving.tokens - arriving.whole) / (arriving.tokens - arriving.start)
        if arriving.whole == arriving.start or not self._terms.other_head(left):
            return
        arriving.reopen()
        try:
            slot = self._issue()
        except DisaggError as error:
            arriving.fail(error)
            return
        self.senders += 1
        if (kv := arriving.kv) is not None:
            kv.sender = kv.weights = ""  # what is found wrong in it may be of either
        self._on_loop(self._reopened, slot)

    def _reopened(self, slot: IssuedTicket) -> None:
        """Another prefill host is to go on."""
        self._slot = slot
        if self._closed:
            self._tickets.revoke(slot.ticket)
            return
        self._news.put_nowait(self._opened(slot))
        self._loop.call_later(max(self._place.waits.next_s, self._terms.elsewhere_s or 0.0), self._require_used, slot)

    def _require_used(self, slot: IssuedTicket) -> None:
        if slot.state == "issued":
            self._tickets.settle(slot, PeerLost("no other prefill host has gone on in time"))

    def _come(self) -> None:
        """A chunk or the end has come, on any thread."""
        self._on_loop(self._look)

    def _look(self) -> None:
        arriving = self.arriving
        self._changed.set()
        if (outcome := arriving.outcome) is None or self.ended:
            return
        self.ended = time.monotonic()
        self._close()
        if isinstance(outcome, DisaggError) and self._goes_on:
            self.resumed = arriving.start if arriving.partial() is None else arriving.whole
            reason = f"{outcome.message}: this host goes on after {self.resumed} of {arriving.tokens} tokens"
            logs.info("prefill_failed", resumed_at=self.resumed, reason=reason)
            self._news.put_nowait(
                LocalEvent(
                    request_id=self._request.id,
                    prompt_tokens=self._request.prompt_tokens,
                    held_tokens=self.resumed,
                    reason=reason[:MAX_REASON_CHARS],
                )
            )

    @property
    def _goes_on(self) -> bool:
        """Whether this host goes on after a failed transfer, instead of a new attempt of the caller: something of the
        KV is of use, or has been used."""
        begun = self._terms.spans.divided and self.arriving.whole > self.arriving.start
        return begun or self.arriving.partial() is not None

    def _close(self) -> None:
        """Give back the slot: its KV has come, or the request has ended."""
        self._closed = True
        self._place.cleanup.close()
        self._tickets.revoke(self._slot.ticket)

    def _on_loop(self, call: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call, *arguments)


async def meanwhile(work: asyncio.Future[Any], slot: OpenSlot | None) -> AsyncGenerator[Event, None]:
    """What the caller of a request is told of its slot until this work is done, which ends with the generator."""
    news: asyncio.Queue[Event] = slot.news if slot is not None else asyncio.Queue()
    try:
        while not (work.done() and news.empty()):
            told = asyncio.ensure_future(news.get())
            try:
                await asyncio.wait((work, told), return_when=asyncio.FIRST_COMPLETED)
                event = told.result() if told.done() else None
            finally:
                told.cancel()
            if event is not None:
                yield event
    finally:
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))
