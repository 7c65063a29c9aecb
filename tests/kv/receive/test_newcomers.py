import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import pytest

from disagg.errors import DisaggError, TicketRefused
from disagg.kv import frames
from disagg.kv.preamble import NONCE_BYTES, Nonces, encode_preamble, encode_proof, proof, ticket_digest
from disagg.kv.receive.newcomers import Newcomers, ProvenConnection
from disagg.kv.receive.pace import ReceiveLimits
from tests.kv.kv_parts import PATIENCE_S, read_replies, read_reply

TICKETS = {ticket_digest(ticket): ticket for ticket in (f"ticket-{i}" for i in range(64))}
NONCE = bytes(NONCE_BYTES)


@dataclass
class Arrivals:
    """Newcomers over socket pairs, at a time that the test chooses; all of one address."""

    limits: ReceiveLimits
    ends: ExitStack
    now: float = 0.0
    admitted: list[str] = field(default_factory=list)
    refused: list[DisaggError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.newcomers = Newcomers(
            select.poll(), self.limits, find, self._admit, lambda address, error: self.refused.append(error)
        )
        self.ends.callback(self.newcomers.close)

    def _admit(self, admission: ProvenConnection) -> None:
        self.admitted.append(admission.ticket)
        admission.sock.close()

    def arrive(self, said: bytes = b"") -> tuple[socket.socket, int]:
        """A connection that has sent `said`: its far end, and the descriptor of the near one."""
        near, far = socket.socketpair()
        self.ends.enter_context(closing(far)).settimeout(PATIENCE_S)
        far.sendall(said)
        descriptor = near.fileno()
        self.newcomers.add(near, "192.0.2.1", self.now)
        return far, descriptor

    def prove(self, far: socket.socket, descriptor: int, ticket: str) -> None:
        """Answer the receiver's proof with the sender's."""
        nonces = Nonces(NONCE, frames.decode_identity(read_reply(far))[0])
        far.sendall(encode_proof(proof(ticket, "sender", nonces), 0))
        self.newcomers.read(descriptor, self.now)


def find(digest: bytes) -> str:
    if digest not in TICKETS:
        raise TicketRefused("no such ticket")
    return TICKETS[digest]


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_all_transfers_of_a_burst_from_one_host_are_admitted_if_all_preambles_come_before_the_first_proof(
    ends: ExitStack,
) -> None:
    arrivals = Arrivals(ReceiveLimits(newcomers=8, newcomers_per_address=4), ends)
    burst = [(*arrivals.arrive(encode_preamble(ticket, NONCE)), ticket) for ticket in TICKETS.values()]
    for far, descriptor, ticket in burst:
        arrivals.prove(far, descriptor, ticket)
    assert arrivals.admitted == list(TICKETS.values()) and not arrivals.refused


def test_silent_connections_end_each_other_and_none_that_has_named_a_ticket(ends: ExitStack) -> None:
    arrivals = Arrivals(ReceiveLimits(newcomers_per_address=4), ends)
    sender, descriptor = arrivals.arrive(encode_preamble("ticket-0", NONCE))
    silent = [arrivals.arrive()[0] for _ in range(10)]
    assert len(arrivals.newcomers) == 1 + 4
    assert [read_replies(sock)[0]["error"]["code"] for sock in silent[:6]] == ["Overloaded"] * 6
    arrivals.prove(sender, descriptor, "ticket-0")
    assert arrivals.admitted == ["ticket-0"]


def test_connections_that_name_a_ticket_and_prove_none_are_bounded_and_the_oldest_is_ended(ends: ExitStack) -> None:
    arrivals = Arrivals(ReceiveLimits(connections=3), ends)
    named = [arrivals.arrive(encode_preamble("ticket-0", NONCE))[0] for _ in range(5)]
    assert len(arrivals.newcomers) == 3
    for ended in named[:2]:
        _, refused = read_replies(ended)
        assert refused["error"]["code"] == "Overloaded" and "sent no proof" in refused["error"]["message"]


def test_for_a_free_descriptor_the_oldest_that_has_named_no_ticket_is_ended_first(ends: ExitStack) -> None:
    arrivals = Arrivals(ReceiveLimits(), ends)
    arrivals.arrive(encode_preamble("ticket-0", NONCE))
    silent, _ = arrivals.arrive()
    assert arrivals.newcomers.evict_oldest()
    assert read_replies(silent)[0]["error"]["code"] == "Overloaded" and len(arrivals.newcomers) == 1
    assert arrivals.newcomers.evict_oldest() and not arrivals.newcomers.evict_oldest()


def test_the_proof_has_its_own_time_from_the_preamble(ends: ExitStack) -> None:
    arrivals = Arrivals(ReceiveLimits(preamble_s=2.0, proof_s=5.0), ends)
    sender, descriptor = arrivals.arrive()
    late, _ = arrivals.arrive()
    arrivals.now = 1.5
    for far in (sender, late):
        far.sendall(encode_preamble("ticket-0", NONCE))
    arrivals.newcomers.read(descriptor, arrivals.now)
    arrivals.now = 6.0
    arrivals.newcomers.expire(arrivals.now)
    assert len(arrivals.newcomers) == 1  # the preamble of the other was never read
    arrivals.prove(sender, descriptor, "ticket-0")
    assert arrivals.admitted == ["ticket-0"]


def test_a_ticket_that_is_named_and_not_proven_is_waited_for_no_longer_than_that(ends: ExitStack) -> None:
    arrivals = Arrivals(ReceiveLimits(preamble_s=2.0, proof_s=5.0), ends)
    sender, _ = arrivals.arrive(encode_preamble("ticket-0", NONCE))
    arrivals.newcomers.expire(4.9)
    assert len(arrivals.newcomers) == 1
    arrivals.newcomers.expire(5.0)
    assert read_replies(sender)[1]["error"]["code"] == "PeerLost" and len(arrivals.newcomers) == 0
