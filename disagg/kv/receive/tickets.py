"""One-time tickets for KV transfers.

A ticket goes issued -> claimed -> done, or from either of the first two to failed. The transfer, its deadline and a
revocation compete for the last step; the first one delivers the outcome, the others have no effect. The parts of one
transfer claim the same ticket, each on a connection of its own; the failure of one ends all.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from disagg.errors import (
    Cancelled,
    DisaggError,
    Overloaded,
    PeerLost,
    TicketRefused,
)
from disagg.kv.arena import Arenas, Reservation
from disagg.kv.arriving import ArrivingKV
from disagg.kv.parts import MAX_PARTS
from disagg.kv.preamble import ticket_digest
from disagg.kv.receive.incoming import Expected, Incoming
from disagg.kv.receive.pace import Pace, ReceiveLimits
from disagg.kv.received import ReceivedKV

TICKET_BYTES = 32

log = logging.getLogger(__name__)

KVOutcome = ReceivedKV | DisaggError
OnOutcome = Callable[[KVOutcome], None]


@dataclass(slots=True, eq=False)
class IssuedTicket:
    """One issued ticket. Only `Tickets` changes it. aborts: end the connections that claimed it and still run.
    pace: how the transfer gets on. failure: the outcome, in state failed."""

    ticket: str
    expected: Expected
    deadline: float  # time.monotonic()
    on_outcome: OnOutcome
    incoming: Incoming
    pace: Pace = field(default_factory=Pace)
    state: Literal["issued", "claimed", "done", "failed"] = "issued"
    claims: int = 0
    aborts: list[Callable[[], None]] = field(default_factory=list)
    failure: DisaggError | None = None


class Tickets:
    """All outstanding tickets of one receiver. Safe to use from any thread.

    arenas: the memory that KV is received into; fresh memory for each transfer if none are given. max_outstanding:
    bound on tickets.
    """

    def __init__(self, arenas: Arenas | None = None, *, max_outstanding: int = 1024) -> None:
        self.arenas = arenas or Arenas()
        self._max_outstanding = max_outstanding
        self._lock = threading.Lock()
        # By a keyed hash of the ticket's digest: a peer learns nothing about any ticket from the time of a lookup.
        self._key = secrets.token_bytes(32)
        self._issued: dict[bytes, IssuedTicket] = {}

    @property
    def outstanding(self) -> int:
        """Tickets issued or claimed whose outcome is not delivered yet."""
        return len(self._issued)

    def issue(
        self,
        expected: Expected,
        on_outcome: OnOutcome,
        *,
        deadline: float,
        memory: Reservation | None = None,
        elsewhere_s: float | None = None,
        arriving: ArrivingKV | None = None,
    ) -> IssuedTicket:
        """A new ticket, valid until `deadline` (time.monotonic()) for the whole transfer. Overloaded at the bound.

        on_outcome is called exactly once, on any thread, with the KV or the error; it must neither block nor raise.
        memory: reserved for the KV; in use from its first part to the KV's release, None if nobody counts it.
        elsewhere_s: seconds in which the KV would come in another way, for which a slow sender is waited at least; None
        if none is known.

        arriving: where the KV arrives; it begins at `arriving.whole`. It owns the memory, also that of KV that
        on_outcome gets. A failure reaches it after on_outcome, which may `reopen` it: then it does not.
        """
        incoming = Incoming(expected, memory, self.arenas, arriving)
        ticket = secrets.token_urlsafe(TICKET_BYTES)
        issued = IssuedTicket(ticket, expected, deadline, on_outcome, incoming, Pace(elsewhere_s))
        with self._lock:
            if len(self._issued) >= self._max_outstanding:
                raise Overloaded(f"{len(self._issued)} KV transfers are already awaited", "try again shortly")
            incoming.arriving.expect(partial(self.revoke, ticket))
            self._issued[self._place(ticket_digest(issued.ticket))] = issued
        return issued

    def find(self, digest: bytes) -> str:
        """The ticket with this digest. TicketRefused if it is unknown, used or expired."""
        with self._lock:
            return self._usable(digest).ticket

    def claim(self, ticket: str, abort: Callable[[], None]) -> IssuedTicket:
        """Use a ticket for one connection, which has proven that it has it. `abort` is called if the ticket ends before
        `unclaim`. TicketRefused if the ticket is unknown, used or expired."""
        with self._lock:
            issued = self._usable(ticket_digest(ticket))
            issued.state = "claimed"
            issued.claims += 1
            issued.aborts.append(abort)
        return issued

    def unclaim(self, issued: IssuedTicket, abort: Callable[[], None]) -> None:
        """The connection that claimed with this `abort` ends by itself."""
        with self._lock:
            issued.aborts.remove(abort)

    def settle(self, issued: IssuedTicket, outcome: KVOutcome) -> bool:
        """Deliver the ticket's outcome; a failure aborts every connection that claimed it. False if an outcome was
        delivered before; the caller then still owns `outcome`."""
        with self._lock:
            if self._issued.pop(self._place(ticket_digest(issued.ticket)), None) is None:
                return False
            issued.failure = outcome if isinstance(outcome, DisaggError) else None
            issued.state = "failed" if issued.failure else "done"
            aborts = list(issued.aborts) if issued.failure else []
        for abort in aborts:
            abort()
        try:
            issued.on_outcome(outcome)
        except Exception:  # a defect in one callback must not stop the thread that serves all requests
            log.exception("request %s: the callback for its KV failed", issued.expected.request_id)
            if isinstance(outcome, ReceivedKV):
                outcome.release()
        issued.incoming.end(issued.failure)
        return True

    def revoke(self, ticket: str) -> bool:
        """End a ticket at any stage with Cancelled; a transfer under way is aborted. False if it had ended."""
        with self._lock:
            issued = self._issued.get(self._place(ticket_digest(ticket)))
        return issued is not None and self.settle(issued, _cancelled())

    def revoke_all(self) -> None:
        """Revoke every ticket: for shutdown."""
        with self._lock:
            tickets = list(self._issued.values())
        for issued in tickets:
            self.settle(issued, _cancelled())

    def expire(self, limits: ReceiveLimits) -> None:
        """Fail every ticket whose deadline has passed, or whose sender gets nowhere. The receiver calls this ten times
        a second."""
        now = time.monotonic()
        with self._lock:
            tickets = list(self._issued.values())
        for issued in tickets:
            if now >= issued.deadline:
                request = issued.expected.request_id
                self.settle(issued, PeerLost(f"the KV of request {request} had not arrived by its deadline"))
            elif (problem := issued.pace.problem(now, limits)) is not None:
                self.settle(issued, problem)

    def _usable(self, digest: bytes) -> IssuedTicket:
        issued = self._issued.get(self._place(digest))
        used_up = issued is not None and (issued.incoming.full or issued.claims >= MAX_PARTS)
        if issued is None or used_up or time.monotonic() >= issued.deadline:
            raise TicketRefused(
                "the KV ticket is unknown, already used or expired", "request a new one from the decode host"
            )
        return issued

    def _place(self, digest: bytes) -> bytes:
        """The key under which the ticket with this digest is kept."""
        return hashlib.blake2b(digest, key=self._key, digest_size=16).digest()


def _cancelled() -> Cancelled:
    return Cancelled("the KV transfer was cancelled by its receiver")
