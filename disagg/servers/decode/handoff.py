"""A hand-off at its decode host: the slot in which a request waits for its KV, with a ticket for whoever sends it."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass

from disagg.api.events import SlotEvent
from disagg.api.names import WIRE_FORMS
from disagg.api.requests import KVAddress
from disagg.engines.base import EngineInfo
from disagg.errors import PeerLost
from disagg.kv.arena import Reservation
from disagg.kv.fingerprint import token_hash
from disagg.kv.receive.incoming import Expected
from disagg.kv.receive.tickets import IssuedTicket, KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from disagg.servers.host.admission import Turns
from disagg.servers.host.request import ActiveRequest

UNUSED_S = 120.0
"""A slot whose ticket no prefill host has used by then is closed, unless its caller extends a lease: its KV memory may
be needed by others. A caller with a lease ends its request if no KV comes, and knows when its prompt is in a queue."""


class Slots:
    """Admits at most `limit` requests to wait for KV at the same time. Others keep their places and wait for their
    turns. unused_s: how long a slot stays open that no prefill host uses and whose caller extends no lease."""

    def __init__(self, tickets: Tickets, address: KVAddress, limit: int, unused_s: float) -> None:
        self._tickets = tickets
        self._address = address
        self._turns = Turns(limit)
        self._unused_s = unused_s

    async def open(
        self,
        request: ActiveRequest,
        info: EngineInfo,
        held_tokens: int,
        memory: Reservation | None,
        elsewhere_s: float | None = None,
    ) -> OpenSlot:
        """A slot for the KV of tokens [held_tokens, all but the last), which comes into `memory`. It ends with the
        request at the latest. elsewhere_s: seconds in which the KV would come in another way; None if none is known."""
        cleanup = ExitStack()
        turn = self._turns.take(request.share, cleanup)
        await request.within_deadline(turn, "there was no free slot for its KV")
        request.cleanup.callback(cleanup.close)
        expected = Expected(
            request_id=request.id,
            layout=info.layout,
            fingerprint=info.fingerprint,
            token_hash=token_hash(request.tokens),
            tokens=len(request.tokens) - 1,
            start=held_tokens,
            wires=WIRE_FORMS,
        )
        loop = asyncio.get_running_loop()
        arrival: asyncio.Future[ReceivedKV] = loop.create_future()
        request.cleanup.callback(_drop, arrival)

        def settle(outcome: KVOutcome) -> None:
            loop.call_soon_threadsafe(_settle, arrival, outcome)

        slot = self._tickets.issue(expected, settle, deadline=request.deadline, memory=memory, elsewhere_s=elsewhere_s)
        cleanup.callback(self._tickets.revoke, slot.ticket)
        request.phase, request.slot, request.slot_sent = "waiting for KV", slot, time.monotonic()
        event = SlotEvent(
            request_id=request.id,
            ticket=slot.ticket,
            kv=self._address,
            prompt_tokens=request.prompt_tokens,
            held_tokens=held_tokens,
        )
        return OpenSlot(event, slot, request, arrival, cleanup, self._unused_s)


@dataclass(slots=True, eq=False)
class OpenSlot:
    """A slot of one request. event: what its caller is sent."""

    event: SlotEvent
    _slot: IssuedTicket
    _request: ActiveRequest
    _arrival: asyncio.Future[ReceivedKV]
    _cleanup: ExitStack
    _unused_s: float

    async def kv(self, sender: str) -> ReceivedKV:
        """Wait for the KV, then close the slot. sender: whose it is, by the caller; "" if that does not
        say. Raises the transfer's error, PeerLost if the request has no lease and none begins in unused_s, and
        DeadlineExceeded at the request's deadline."""
        with self._cleanup:
            kv = await self._request.within_deadline(self._wait(), "the KV had not arrived")
            kv.sender = sender or kv.sender
            return kv

    async def _wait(self) -> ReceivedKV:
        await asyncio.wait((self._arrival,), timeout=None if self._request.leased else self._unused_s)
        if not self._arrival.done() and self._slot.state == "issued":
            text = f"no prefill host has sent KV within {self._unused_s:g} s"
            raise PeerLost(text, "see the log of the prefill host")
        return await self._arrival


def _settle(arrival: asyncio.Future[ReceivedKV], outcome: KVOutcome) -> None:
    """On the event loop: pass the transfer's outcome to the request, or release it if the request has ended."""
    if arrival.done():
        if isinstance(outcome, ReceivedKV):
            outcome.release()
    elif isinstance(outcome, ReceivedKV):
        arrival.set_result(outcome)
    else:
        arrival.set_exception(outcome)


def _drop(arrival: asyncio.Future[ReceivedKV]) -> None:
    """Release the KV if it has arrived, even in the moment in which its request ended; else stop waiting for it."""
    if not arrival.done():
        arrival.cancel()
    elif not arrival.cancelled() and arrival.exception() is None:
        arrival.result().release()
