"""HTTP/1.1 with bounded heads, bounded waits and bounded connections, and with TLS.

The place of a connection and the time for its first head begin when it is accepted: a handshake has no others. uvicorn
closes a connection that is idle after a response, but waits without limit for a first request head: 2,300 such
connections used up a server's file descriptors, so that its KV port accepted no transfer either.

A new connection takes the place of the least useful one, which is never one that carries a request, nor one that is
new: a server may accept many connections before it reads what has arrived on the first. Callers that have not shown a
token or key, once per connection, have places of their own, and few per address: they cannot lock out the others.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.server import ServerState

from disagg.http.arrival import Refused
from disagg.http.lazy import LazyProtocol
from disagg.tls.certificate import ServerTLS
from disagg.tls.transport import HANDSHAKE, SecureTransport

KEEP_ALIVE_S = 75
_CONNECTION = "connection"  # in the state of an ASGI scope
NEW_S = 2.0  # see ConnectionBounds


@dataclass(frozen=True, slots=True)
class Encryption:
    """Whether connections have TLS. tls: None if the server has no certificate. plain: connections without TLS are
    served, too."""

    tls: ServerTLS | None = None
    plain: bool = True


class BoundedProtocol(LazyProtocol):
    """HTTP that is parsed as it is needed, with TLS, a timer on request heads and a place among a bounded number of
    connections. uvicorn has a bound on requests at work, none on connections, and takes TLS or plain HTTP, not both."""

    place: ServedConnection

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        bounds: ConnectionBounds,
        encryption: Encryption,
        read_buffer: memoryview,
    ) -> None:
        super().__init__(config, server_state, app_state, read_buffer=read_buffer)
        self._bounds = bounds
        self._encryption = encryption
        self._secure: SecureTransport | None = None
        self._begun = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        others = places(self.connections)
        super().connection_made(transport)
        address, now = self.client[0] if self.client else "", time.monotonic()
        self.place = ServedConnection(address, weakref.proxy(self), now, new_s=self._bounds.new_s)
        self.app_state = {**self.app_state, _CONNECTION: self.place}
        victim = make_room(self.place, others, self._bounds)
        if victim is not None:
            victim.owner.close_idle()
        elif self.place.surplus and sum(one.surplus for one in others) >= self._bounds.surplus:
            transport.abort()
            return
        self._expect_head()

    def opened(self, data: bytes) -> bytes:
        """What has arrived, decrypted if the connection has TLS, which its first byte shows."""
        if not self._begun:
            self._begun = True
            if data[0] == HANDSHAKE and self._encryption.tls is not None:
                self.transport = self._secure = SecureTransport(self.transport, self._encryption.tls.context())
                self.scheme = "https"
            elif not self._encryption.plain:
                raise Refused(400, "this server speaks TLS: ask it by https://")
        if self._secure is None:
            return data
        try:
            data = self._secure.decrypt(data)
        except ssl.SSLError:
            self.transport.abort()
            return b""
        if self._secure.ended:
            self.transport.close()
        return data

    def parse(self) -> None:
        idle = self.between_requests
        super().parse()
        self.place.busy = not self.between_requests
        if self.place.busy:
            self._stop_timer()
        elif idle and self._head_timer is None and not self.dropping:  # a head has started on a kept-alive connection
            self._expect_head()

    def on_response_complete(self) -> None:
        self.place.busy, self.place.answered, self.place.idle_since = False, True, time.monotonic()
        super().on_response_complete()  # may begin the next request, which has arrived already
        self.place.busy = not self.between_requests

    def drop(self) -> None:
        self._stop_timer()
        self.place.answered, self.place.idle_since = True, 0.0  # the first to be closed for another
        super().drop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def prove(self) -> None:
        """A request on this connection had a valid token: it may take a place that is kept for those that have one."""
        self.place.proven = True
        if self.place.surplus:
            self.place.surplus = not has_place(places(self.connections), self._bounds)

    def close_idle(self) -> None:
        """Close this connection, which carries no request, for another one."""
        self.connections.discard(self)
        self._stop_timer()
        self.transport.close()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self._bounds.head_s, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self.between_requests:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def connection_of(scope: Scope) -> ServedConnection | None:
    """The connection that this request is on; None without a server, as in a test of an application alone."""
    found: ServedConnection | None = scope.get("state", {}).get(_CONNECTION)
    return found


def places(connections: Iterable[Any]) -> list[ServedConnection]:
    """The places of these connections."""
    return [one.place for one in connections if isinstance(one, BoundedProtocol)]


def free_descriptor(connections: Iterable[Any]) -> bool:
    """Close the least useful connection. False if all carry requests or are new."""
    victim = least_useful(places(connections), time.monotonic())
    if victim is not None:
        victim.owner.close_idle()
    return victim is not None


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """How many connections a server has, and how long it waits for what is sent on them.

    unproven: of them, for callers that have not shown that they may use it; the rest of the places are for those that
    have. unproven_per_address: of those; connections that are new take more, while no other address needs the places.
    surplus: beyond `connections`; they are answered with 503, or with the server's health, instead of a reset.
    head_s: from the moment a request may start until its head is complete. new_s: for the first bytes of a connection's
    first request; until then it is not closed for another.
    """

    connections: int = 512
    unproven: int = 384
    unproven_per_address: int = 64
    surplus: int = 64
    head_s: float = 10.0
    new_s: float = NEW_S


@dataclass(slots=True, eq=False)
class ServedConnection:
    """One connection.

    owner: what closes it, by a weak reference. idle_since: its last answer, or its begin. answered: it has had an
    answer. proven: a request on it had a valid token or key. busy: it carries a request. surplus: there was no place
    for it. new_s: see ConnectionBounds.
    """

    address: str
    owner: Any = field(default=None, repr=False)
    idle_since: float = 0.0
    answered: bool = False
    proven: bool = False
    busy: bool = False
    surplus: bool = False
    new_s: float = NEW_S

    def is_new(self, now: float) -> bool:
        """Whether its caller may not have had the time to send a request."""
        return not self.answered and now - self.idle_since < self.new_s


def make_room(
    new: ServedConnection, others: Collection[ServedConnection], bounds: ConnectionBounds
) -> ServedConnection | None:
    """The connection to close for the new one, if any. Marks the new one as surplus if there is no room.

    The new one's `idle_since` is now. An address with more connections than its bound loses its own first, even new
    ones if another address needs their place.
    """
    now, limit = new.idle_since, bounds.unproven_per_address
    kept = [one for one in others if not one.surplus]
    unproven = [one for one in kept if not one.proven]
    by_address = Counter(one.address for one in unproven)
    of_address = [one for one in unproven if one.address == new.address and not one.is_new(now)]
    crowds = [one for one in unproven if by_address[one.address] > limit]
    if len(of_address) >= limit:
        victim = least_useful(of_address)
    elif len(unproven) >= bounds.unproven:
        victim = least_useful(crowds, now) or least_useful(unproven, now)
        if victim is None and by_address[new.address] < limit:
            victim = least_useful(crowds)
    elif len(kept) >= bounds.connections:
        victim = least_useful(kept, now)
    else:
        return None
    if victim is not None:
        return victim
    new.surplus = True
    surplus = [one for one in others if one.surplus]
    return least_useful(surplus) if len(surplus) >= bounds.surplus else None


def least_useful(connections: Iterable[ServedConnection], now: float = math.inf) -> ServedConnection | None:
    """The unproven connection that has been idle for longest, else the proven one. None if all carry requests, or are
    new by `now`."""
    idle = (one for one in connections if not one.busy and not one.is_new(now))
    return min(idle, key=lambda one: (one.proven, one.idle_since), default=None)


def has_place(others: Collection[ServedConnection], bounds: ConnectionBounds) -> bool:
    """Whether there is a place for a caller that has proven itself, besides these connections."""
    return sum(not one.surplus for one in others) < bounds.connections
