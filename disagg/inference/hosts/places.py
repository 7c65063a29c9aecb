"""How many of this client's requests are at each host: as many as that has places, in fair shares of their keys.

More would only be refused there, again and again. A request within its key's share is never held back: the host, which
knows the requests of all clients, lets another one yield. Those that are held back are woken in turn. No I/O, no clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from disagg.api.requests import Share
from disagg.api.status import Load
from disagg.config import Host
from disagg.errors import Overloaded
from disagg.shares import Counted, Place, Places, ahead, next_in_turn

LOOK_AGAIN_S: Final = 5
"""A request that is held back looks again after about so long, though nothing has woken it."""


@dataclass(slots=True, eq=False)
class HostPlace:
    """The place of one request at one host."""

    host: str
    place: Place
    tokens: int


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A request that waits for a place at one of these hosts. since: when it came."""

    hosts: Collection[str]
    share: Share
    since: float
    wake: Callable[[], None]


@dataclass(slots=True)
class _AtHost:
    """What is at one host. tokens: those of the prompts of the requests there, by key."""

    places: Places = field(default_factory=lambda: Places(1))
    tokens: Counted = field(default_factory=Counted)


class HostPlaces:
    """The places of one client's requests, at all hosts."""

    def __init__(self) -> None:
        self._hosts: dict[str, _AtHost] = {}
        self._waiting: list[_WaitingRequest] = []  # the first comer first

    def enter(self, host: Host, load: Load | None, share: Share, tokens: int, now: float) -> HostPlace:
        """A place for a request with so many prompt tokens. Raises Overloaded if its key is over its share, and no
        place is free for it."""
        at = self._hosts.setdefault(host.name, _AtHost())
        at.places.limit = (load.running_limit if load is not None else host.engine.max_batch) + host.queue_size
        if (place := at.places.enter(share, now)) is None:
            there = at.places.taken
            text = f"{host.name} has no place for more than {there} requests of this client"
            full = Overloaded(text, "try again in a moment")
            full.retry_after_s = LOOK_AGAIN_S
            raise full
        at.tokens.see(share, now)
        at.tokens.add(share.key, tokens)
        return HostPlace(host.name, place, tokens)

    def leave(self, place: HostPlace, now: float) -> None:
        """The request has left its host. A second call does nothing."""
        if not place.place.given_back:
            at, share = self._hosts[place.host], place.place.share
            at.places.give_back(place.place, now)
            at.tokens.add(share.key, -place.tokens)
            at.tokens.see(share, now)
            self._wake_next(place.host, now)

    @contextmanager
    def waiting(self, hosts: Collection[str], share: Share, since: float, wake: Callable[[], None]) -> Iterator[None]:
        """Within the block, `wake` is called once, at its turn for a place at one of the hosts. since: when it came."""
        one = _WaitingRequest(hosts, share, since, wake)
        insort(self._waiting, one, key=lambda other: other.since)
        try:
            yield
        finally:
            if one in self._waiting:
                self._waiting.remove(one)

    def _wake_next(self, host: str, now: float) -> None:
        """Wake the one whose turn it is, now that a place at this host is free."""
        first: dict[str, _WaitingRequest] = {}  # of each key
        for one in self._waiting:
            if host in one.hosts:
                first.setdefault(one.share.key, one)
        places = self._hosts[host].places
        claims = {}
        for one in first.values():
            claims = places.claims(one.share, now)
        if first and (at := next_in_turn(claims, list(first), places.limit)) is not None:
            woken = list(first.values())[at]
            self._waiting.remove(woken)
            woken.wake()

    def tokens_ahead(self, host: str, share: Share, total: int) -> int:
        """Prompt tokens that are computed before those of a new request. total: all that wait at this host."""
        at = self._hosts.get(host)
        return total if at is None else int(ahead(at.tokens.all, share, total))
