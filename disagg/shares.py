"""Fair shares among keys: of the places of a gateway and a host, the rows of a batch, the time of a prefill host. Pure.

    a key alone           gets everything
    within its share      any free place; if there is none, the key that has most for its weight, and more than its
                          share, yields its youngest place with which nothing has begun
    over its share        a free place, as long as one stays free for each other key seen lately that has none
    next in turn          of those that may go on, the key that has least for its weight; of one key, the first comer
    prompts to compute    first those of the keys that have had least of the last seconds for their weights

Requests without a key, which come from programs with the fleet's token, are together one more key. Hosts know keys by
their ids, which all gateways of a fleet share: a key that comes through several gateways has one share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from disagg.api.requests import Share

PRESENT_S: Final = 60.0
"""A key counts for so long after its last request."""
KEPT_FREE: Final = 0.5
"""At most this part of the places stays free for keys that have none."""
COMPUTING_S: Final = 10.0
"""About so many of the last seconds count as what a key has computed lately."""
LEAST_S: Final = 0.1
"""So much computing, for its weight, gives no key a lower rank; nor does less than twice as much as another has had."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a key has of something, and its weight."""

    weight: int
    held: float = 0.0

    @property
    def relative(self) -> float:
        """What it has for its weight."""
        return self.held / self.weight


Claims = Mapping[str, Claim]
"""The claims of all keys that count now, by key."""


def share(claims: Claims, key: str, limit: float) -> float:
    """How much of `limit` is the key's by its weight."""
    return limit * claims[key].weight / sum(claim.weight for claim in claims.values())


def within(claims: Claims, key: str, limit: float, more: float = 0.0) -> bool:
    """Whether the key, with so much more, has at most its share."""
    return claims[key].held + more <= share(claims, key, limit)


def may_take(claims: Claims, key: str, limit: int, more: int = 1) -> bool:
    """Whether the key may take so many more places while no other key yields any."""
    free = limit - sum(claim.held for claim in claims.values()) - more
    return free >= 0 and (_has_right(claims, key, limit, more) or free >= kept_free(claims, key, limit))


def kept_free(claims: Claims, key: str, limit: int) -> int:
    """How many places this key leaves free for others if it has more than its share."""
    without = sum(not claim.held for other, claim in claims.items() if other != key)
    return min(without, int(limit * KEPT_FREE))


def yielding(claims: Claims, key: str, limit: int, more: int = 1) -> list[str]:
    """The keys that yield places if this one wants so many more, the first to yield first; none if it has no right to
    them."""
    if not _has_right(claims, key, limit, more):
        return []
    over = [other for other, claim in claims.items() if claim.held > max(1.0, share(claims, other, limit))]
    return sorted((other for other in over if other != key), key=lambda other: -claims[other].relative)


def next_in_turn(claims: Claims, waiting: Sequence[str], limit: int) -> int | None:
    """Who of those that wait for one place each gets the next one; None if nobody may have one now. waiting: their
    keys, the first comer first."""
    may = [at for at, key in enumerate(waiting) if may_take(claims, key, limit, 1)]
    return may[least(claims, [waiting[at] for at in may])] if may else None


def least(claims: Claims, waiting: Sequence[str]) -> int:
    """Who of those that wait has least for its weight; the first of these. waiting: as above, not empty."""
    return min(range(len(waiting)), key=lambda at: claims[waiting[at]].relative)


def rank(claim: Claim) -> int:
    """The rank of a key's prompts by the seconds of computing that it has had lately, the lowest first: how many times
    they are the double of LEAST_S. Keys that have had about the same have the same rank, and prompts of one rank are
    computed one after the other, not a chunk of each in turn."""
    return max(0, math.ceil(math.log2(max(claim.relative, 1e-9) / LEAST_S)))


def ahead(claims: Claims, share: Share, total: float) -> float:
    """How much of `total`, which waits, comes before something new of this key, if the others have no more than their
    shares meanwhile. claims: what waits of each key, as far as it is known; total may be more."""
    others = sum(claim.weight for key, claim in claims.items() if claim.held and key != share.key)
    if not others:
        return total
    own = claims[share.key].held if share.key in claims else 0.0
    return min(total, own * (others + share.weight) / share.weight)


def _has_right(claims: Claims, key: str, limit: int, more: int) -> bool:
    """Whether the places are within the key's share. Its first one always is, however many keys there are."""
    return within(claims, key, limit, more) or (claims[key].held == 0 and more == 1)


@dataclass(slots=True)
class _Key:
    """A key as it was last seen."""

    weight: int
    seen: float
    held: float = 0.0


class Counted:
    """How much each key has, and which keys count now: those that have something, and those seen lately. Times are
    time.monotonic()."""

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}

    def see(self, share: Share, now: float) -> None:
        """A request of this key has come, or has ended."""
        if (known := self._keys.get(share.key)) is None:
            self._keys[share.key] = _Key(share.weight, now)
        else:
            known.weight, known.seen = share.weight, now

    def add(self, key: str, amount: float) -> None:
        """A key that was seen has so much more; less, if the amount is negative."""
        self._keys[key].held += amount

    def held(self, key: str) -> float:
        """How much this key has."""
        return self._keys[key].held if key in self._keys else 0.0

    @property
    def total(self) -> float:
        """How much all have."""
        return sum(one.held for one in self._keys.values())

    @property
    def all(self) -> dict[str, Claim]:
        """What each key has, also those that no longer count."""
        return {key: Claim(one.weight, one.held) for key, one in self._keys.items()}

    def claims(self, now: float) -> dict[str, Claim]:
        """The claims of all keys that count now; the others are forgotten."""
        gone = [key for key, one in self._keys.items() if not one.held and now - one.seen > PRESENT_S]
        for key in gone:
            del self._keys[key]
        return self.all


class Computing(Counted):
    """The seconds of computing that each key has had lately: earlier ones fade, to a third in COMPUTING_S."""

    def __init__(self) -> None:
        super().__init__()
        self._faded = 0.0

    def computed(self, key: str, seconds: float, now: float) -> None:
        """So many seconds went to this key's prompts."""
        self._fade(now)
        if key in self._keys:
            self.add(key, seconds)

    def claims(self, now: float) -> dict[str, Claim]:
        self._fade(now)
        return super().claims(now)

    def _fade(self, now: float) -> None:
        factor = math.exp((self._faded - now) / COMPUTING_S)
        self._faded = now
        for one in self._keys.values():
            one.held = 0.0 if one.held * factor < 0.001 else one.held * factor


@dataclass(slots=True, eq=False)
class Place:
    """Places that one request has. waiting: whether nothing has begun with it, so that it may yield them. give_up: is
    called when it has to."""

    share: Share
    count: int
    waiting: Callable[[], bool]
    give_up: Callable[[], None]
    given_back: bool = field(default=False, init=False)


class Places:
    """Who has how many of `limit` places; the oldest first. Nothing waits here."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._counted = Counted()
        self._taken: dict[Place, None] = {}

    @property
    def taken(self) -> int:
        return int(self._counted.total)

    def held(self, key: str) -> int:
        """Places that this key has."""
        return int(self._counted.held(key))

    def claims(self, share: Share, now: float) -> dict[str, Claim]:
        """The claims of all keys that count now, this one among them."""
        self._counted.see(share, now)
        return self._counted.claims(now)

    def available(self, share: Share, count: int, now: float) -> bool:
        """Whether `take` would find so many places."""
        return self._to_yield(share, count, now) is not None

    def take(
        self,
        share: Share,
        count: int,
        now: float,
        *,
        waiting: Callable[[], bool] = lambda: False,
        give_up: Callable[[], None] = lambda: None,
    ) -> Place | None:
        """Take so many places, which others may have to yield; None if there are none. See Place."""
        if (giving := self._to_yield(share, count, now)) is None:
            return None
        for place in giving:
            self.give_back(place, now)
            place.give_up()
        return self._taken_by(Place(share, count, waiting, give_up))

    def enter(self, share: Share, now: float) -> Place | None:
        """A place, beyond the limit if it is within the key's share: who yields for it is decided elsewhere."""
        claims = self.claims(share, now)
        if may_take(claims, share.key, self.limit, 1) or _has_right(claims, share.key, self.limit, 1):
            return self._taken_by(Place(share, 1, lambda: False, lambda: None))
        return None

    def give_back(self, place: Place, now: float) -> None:
        """The places are free again. A second call does nothing."""
        if not place.given_back:
            place.given_back = True
            del self._taken[place]
            self._counted.add(place.share.key, -place.count)
            self._counted.see(place.share, now)

    def _taken_by(self, place: Place) -> Place:
        self._counted.add(place.share.key, place.count)
        self._taken[place] = None
        return place

    def _to_yield(self, share: Share, count: int, now: float) -> list[Place] | None:
        """What has to be yielded for so many places; None if they cannot be had."""
        claims = self.claims(share, now)
        if may_take(claims, share.key, self.limit, count):
            return []
        found: list[Place] = []
        missing = count - (self.limit - self.taken)
        while missing > 0:
            keys = yielding(claims, share.key, self.limit, count)
            young = (self._youngest(key, found) for key in keys)
            if (place := next(filter(None, young), None)) is None:
                return None
            found.append(place)
            missing -= place.count
            claim = claims[place.share.key]
            claims[place.share.key] = Claim(claim.weight, claim.held - place.count)
        return found if found else None

    def _youngest(self, key: str, found: Sequence[Place]) -> Place | None:
        """The youngest place of this key with which nothing has begun, and that is not found already."""
        own = (place for place in reversed(self._taken) if place.share.key == key and place not in found)
        return next((place for place in own if place.waiting()), None)
