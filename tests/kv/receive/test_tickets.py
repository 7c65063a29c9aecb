import threading
import time
from typing import Any

import pytest
from msgspec import structs

from disagg.errors import (
    Cancelled,
    DisaggError,
    FingerprintMismatch,
    LayoutMismatch,
    Overloaded,
    PeerLost,
    ProtocolError,
    TicketRefused,
)
from disagg.kv.arena import Reservation
from disagg.kv.preamble import ticket_digest
from disagg.kv.receive.pace import ReceiveLimits
from disagg.kv.receive.tickets import IssuedTicket, KVOutcome, Tickets
from disagg.kv.received import ReceivedKV
from tests.kv.kv_parts import FINGERPRINT, PATIENCE_S, Cache, expected, header_for, mixed_layout

EXPECTED = expected(Cache.random(mixed_layout(), 5))


def issue(tickets: Tickets, lasts_s: float = PATIENCE_S) -> tuple[IssuedTicket, list[KVOutcome]]:
    results: list[KVOutcome] = []
    return tickets.issue(EXPECTED, results.append, deadline=time.monotonic() + lasts_s), results


def nothing() -> None:
    pass


def test_a_ticket_is_good_once() -> None:
    tickets = Tickets()
    slot, _ = issue(tickets)
    assert tickets.find(ticket_digest(slot.ticket)) == slot.ticket
    assert tickets.claim(slot.ticket, nothing) is slot
    slot.incoming.join(header_for(slot))
    with pytest.raises(TicketRefused):
        tickets.claim(slot.ticket, nothing)


@pytest.mark.parametrize("ticket", ["", "x", "é"])
def test_an_unknown_ticket_is_refused(ticket: str) -> None:
    tickets = Tickets()
    issue(tickets)
    with pytest.raises(TicketRefused, match="unknown, already used or expired"):
        tickets.claim(ticket, nothing)
    with pytest.raises(TicketRefused, match="unknown, already used or expired"):
        tickets.find(ticket_digest(ticket))


def test_an_expired_ticket_is_refused_and_its_callback_called_once() -> None:
    tickets = Tickets()
    slot, results = issue(tickets, lasts_s=-1)
    with pytest.raises(TicketRefused):
        tickets.claim(slot.ticket, nothing)
    tickets.expire(ReceiveLimits())
    tickets.expire(ReceiveLimits())
    assert [type(r) for r in results] == [PeerLost]
    assert tickets.outstanding == 0


def test_tickets_are_long_and_all_different() -> None:
    tickets = Tickets()
    names = {issue(tickets)[0].ticket for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) >= 43 for name in names)


def test_the_number_of_outstanding_tickets_is_bounded() -> None:
    tickets = Tickets(max_outstanding=2)
    slot, _ = issue(tickets)
    issue(tickets)
    with pytest.raises(Overloaded):
        issue(tickets)
    tickets.revoke(slot.ticket)
    issue(tickets)


def test_revoking_calls_the_callback_and_aborts_the_connection() -> None:
    tickets = Tickets()
    slot, results = issue(tickets)
    cut: list[str] = []
    tickets.claim(slot.ticket, lambda: cut.append("cut"))
    assert tickets.revoke(slot.ticket)
    assert not tickets.revoke(slot.ticket)
    assert [type(r) for r in results] == [Cancelled]
    assert cut == ["cut"]
    assert slot.state == "failed"


def test_one_result_is_delivered_however_many_compete() -> None:
    tickets = Tickets()
    slot, results = issue(tickets)
    barrier = threading.Barrier(8)

    def compete() -> None:
        barrier.wait(PATIENCE_S)
        tickets.settle(slot, ProtocolError("x"))

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(results) == 1


def test_an_owner_that_fails_does_not_harm_the_receiver(caplog: pytest.LogCaptureFixture) -> None:
    tickets = Tickets()

    def broken(_: KVOutcome) -> None:
        raise RuntimeError("owner's defect")

    slot = tickets.issue(EXPECTED, broken, deadline=0)
    tickets.expire(ReceiveLimits())
    assert slot.state == "failed"
    assert "owner's defect" in caplog.text


def test_kv_whose_callback_failed_is_released() -> None:
    def broken(_: KVOutcome) -> None:
        raise RuntimeError("owner's defect")

    tickets, memory = Tickets(), Reservation(10, lambda nbytes: None)
    kv = ReceivedKV(EXPECTED.layout, 5, None, on_release=memory.use())
    assert tickets.settle(tickets.issue(EXPECTED, broken, deadline=0, memory=memory), kv)
    assert not memory.in_use


def test_a_part_whose_request_has_ended_gets_no_memory() -> None:
    memory = Reservation(10, lambda nbytes: None)
    slot = Tickets().issue(EXPECTED, lambda outcome: None, deadline=time.monotonic() + PATIENCE_S, memory=memory)
    memory.use()()
    with pytest.raises(Cancelled, match="has been released"):
        slot.incoming.join(header_for(slot))


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"layout": mixed_layout("float16")}, LayoutMismatch, "dtype"),
        ({"fingerprint": structs.replace(FINGERPRINT, chat_template="other")}, FingerprintMismatch, "chat_template"),
        ({"token_hash": "0" * 64}, FingerprintMismatch, "token_hash"),
        ({"tokens": 6}, FingerprintMismatch, "token_hash"),
        ({"start": 1}, ProtocolError, "from token 1"),
        ({"request_id": "other"}, ProtocolError, "request other"),
    ],
)
def test_a_transfer_for_something_else_is_refused_by_name(
    changes: dict[str, Any], error: type[DisaggError], names: str
) -> None:
    slot, _ = issue(Tickets())
    EXPECTED.require(header_for(slot))
    with pytest.raises(error, match=names):
        EXPECTED.require(header_for(slot, **changes))
