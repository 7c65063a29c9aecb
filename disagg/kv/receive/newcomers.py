"""Connections that have not proven a ticket. One thread serves them all and waits for none.

A newcomer names a ticket, gets this end's proof that it has it, and sends its own. That moves its connection to a
thread of its own; everything else costs a small reply. There is always room for one more: the oldest newcomer is ended
for it. Those that have named a valid ticket are not ended for those that have named none.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.errors import DisaggError, Overloaded, PeerLost, TicketRefused
from disagg.kv import frames
from disagg.kv.preamble import (
    MAX_HEADER_BYTES,
    NONCE_BYTES,
    OPENING,
    PREAMBLE,
    PROOF,
    Nonces,
    check_opening,
    decode_preamble,
    decode_proof,
    proof,
    proves,
)
from disagg.kv.receive.pace import ReceiveLimits

DISCARD_BYTES = 1 << 16  # per read, of what follows a refused preamble

Find = Callable[[bytes], str]
"""The ticket with this digest; raises TicketRefused."""


@dataclass(frozen=True, slots=True)
class ProvenConnection:
    """A connection that has proven that it has this ticket. header_bytes: how many bytes of header follow. version: of
    the protocol that it uses."""

    sock: socket.socket
    address: str
    ticket: str
    header_bytes: int
    version: int


Admit = Callable[[ProvenConnection], None]
"""Takes the connection over, or raises the error that refuses it."""


@dataclass(slots=True, eq=False)
class Newcomer:
    """A connection that has not proven a ticket.

    named: the valid ticket that it has named, and the nonces of both ends; None before. raw: what it has sent of
    its preamble, then of its proof. discard: how many more bytes to read and ignore after a refusal, so that closing
    does not reset the connection and lose the reply; None before one. until: when the connection is ended.
    """

    sock: socket.socket
    address: str
    until: float
    named: tuple[str, Nonces] | None = None
    raw: bytearray = field(default_factory=bytearray)
    discard: int | None = None


class Newcomers:
    """Used by one thread, which polls `poll` and passes on what it reports. Times are time.monotonic()."""

    def __init__(
        self,
        poll: select.poll,
        limits: ReceiveLimits,
        find: Find,
        admit: Admit,
        refused: Callable[[str, DisaggError], None],
    ) -> None:
        self._poll = poll
        self._limits = limits
        self._find = find
        self._admit = admit
        self._refused = refused
        self._waiting: dict[int, Newcomer] = {}  # by file descriptor, oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sock: socket.socket, address: str, now: float) -> None:
        """A new connection. Its preamble is usually there already: then it is answered at once."""
        unnamed = self._that_have_named(False)
        same = [one for one in unnamed if one.address == address]
        if len(same) >= self._limits.newcomers_per_address:
            self._evict(same[0])
        elif len(unnamed) >= self._limits.newcomers:
            self._evict(unnamed[0])
        sock.setblocking(False)
        newcomer = Newcomer(sock, address, now + self._limits.preamble_s)
        self._waiting[sock.fileno()] = newcomer
        self._poll.register(sock, select.POLLIN)
        self.read(sock.fileno(), now)

    def evict_oldest(self) -> bool:
        """End the oldest newcomer, if possible one that has named no ticket; False if there is none."""
        for oldest in self._that_have_named(False) or self._that_have_named(True):
            self._evict(oldest)
            return True
        return False

    def read(self, descriptor: int, now: float) -> None:
        """Read what a newcomer has sent."""
        newcomer = self._waiting.get(descriptor)
        if newcomer is None:  # ended since it was polled
            return
        try:
            if newcomer.discard is None:
                self._read(newcomer, now)
            else:
                self._discard(newcomer, newcomer.discard)
        except BlockingIOError:
            pass
        except OSError:  # reset: nobody is left to reply to
            self._end(newcomer)
        except DisaggError as error:
            self._refuse(newcomer, error, now)
        except Exception:  # out of memory, for one: the thread logs it and goes on
            self._end(newcomer)
            raise

    def expire(self, now: float) -> None:
        """End those whose time has passed; one that has proven no ticket gets a reply."""
        for newcomer in [one for one in self._waiting.values() if now >= one.until]:
            if newcomer.discard is None:
                self._dismiss(newcomer, PeerLost(self._missing(newcomer)))
            else:
                self._end(newcomer)

    def close(self) -> None:
        """End all."""
        for newcomer in list(self._waiting.values()):
            self._end(newcomer)

    def _that_have_named(self, named: bool) -> list[Newcomer]:
        """The newcomers that have named a valid ticket, or those that have not; oldest first."""
        return [one for one in self._waiting.values() if (one.named is not None) == named]

    def _missing(self, newcomer: Newcomer) -> str:
        if newcomer.named is None:
            return f"no KV ticket came within {self._limits.preamble_s:g} s"
        return f"no proof of its KV ticket came within {self._limits.proof_s:g} s"

    def _read(self, newcomer: Newcomer, now: float) -> None:
        if newcomer.named is None:
            self._fill(newcomer, OPENING.size)
            check_opening(bytes(newcomer.raw[: OPENING.size]))
            self._fill(newcomer, PREAMBLE.size)
            self._identify(newcomer, now)
        assert newcomer.named is not None
        ticket, nonces = newcomer.named
        self._fill(newcomer, PROOF.size)
        given = decode_proof(bytes(newcomer.raw))
        if not proves(given.proof, ticket, "sender", nonces):
            raise TicketRefused("the sender does not have the KV ticket that it names")
        proven = ProvenConnection(newcomer.sock, newcomer.address, ticket, given.header_bytes, nonces.version)
        self._hand_over(newcomer, proven)

    def _fill(self, newcomer: Newcomer, size: int) -> None:
        """Read until `raw` has this size. Raises BlockingIOError if that much has not arrived yet."""
        while (missing := size - len(newcomer.raw)) > 0:
            piece = newcomer.sock.recv(missing)
            if not piece:
                raise PeerLost("the connection was closed before its ticket was proven")
            newcomer.raw += piece

    def _identify(self, newcomer: Newcomer, now: float) -> None:
        """Prove to the sender that this end has the ticket which its preamble names. It then has time for its own
        proof: one host sends many prompts at once, and the proofs of all may come after the last preamble."""
        preamble = decode_preamble(bytes(newcomer.raw))
        ticket = self._find(preamble.ticket_digest)
        named = self._that_have_named(True)
        if len(named) >= self._limits.connections:
            self._evict(named[0])
        nonces = Nonces(preamble.nonce, secrets.token_bytes(NONCE_BYTES), preamble.version)
        newcomer.sock.send(frames.encode_identity(nonces.receiver, proof(ticket, "receiver", nonces)))
        newcomer.named, newcomer.until = (ticket, nonces), now + self._limits.proof_s
        newcomer.raw.clear()

    def _hand_over(self, newcomer: Newcomer, admission: ProvenConnection) -> None:
        self._forget(newcomer)
        try:
            self._admit(admission)
        except Exception:  # not handed over: `read` ends it
            self._waiting[newcomer.sock.fileno()] = newcomer
            self._poll.register(newcomer.sock, select.POLLIN)
            raise

    def _refuse(self, newcomer: Newcomer, error: DisaggError, now: float) -> None:
        """Reply, and leave the peer time to read the reply."""
        self._refused(newcomer.address, error)
        if self._reply(newcomer, error):
            newcomer.discard = MAX_HEADER_BYTES
            newcomer.until = now + self._limits.linger_s
        else:
            self._end(newcomer)

    def _discard(self, newcomer: Newcomer, room: int) -> None:
        got = len(newcomer.sock.recv(DISCARD_BYTES))
        newcomer.discard = room - got
        if got == 0 or newcomer.discard <= 0:
            self._end(newcomer)

    def _evict(self, newcomer: Newcomer) -> None:
        if newcomer.discard is None:
            missing = "named no valid KV ticket" if newcomer.named is None else "sent no proof of its KV ticket"
            error = Overloaded(f"other connections came while this one {missing}", "send it at once, or try again")
            self._dismiss(newcomer, error)
        else:
            self._end(newcomer)

    def _dismiss(self, newcomer: Newcomer, error: DisaggError) -> None:
        self._refused(newcomer.address, error)
        self._reply(newcomer, error)
        self._end(newcomer)

    def _reply(self, newcomer: Newcomer, error: DisaggError) -> bool:
        """Send the last reply, which fits the empty buffer of a new socket. False if the peer has gone."""
        try:
            newcomer.sock.send(frames.encode_error(error))
            newcomer.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    def _end(self, newcomer: Newcomer) -> None:
        self._forget(newcomer)
        newcomer.sock.close()

    def _forget(self, newcomer: Newcomer) -> None:
        self._waiting.pop(newcomer.sock.fileno(), None)
        with contextlib.suppress(KeyError):
            self._poll.unregister(newcomer.sock)
