"""Which connection a server closes for a new one when there are too many. Pure; times are time.monotonic().

A caller proves itself with a token or key, once per connection. Those that have not cannot lock out those that have,
or will: they have places of their own, and few per address. A new connection takes the place of the least useful one,
which is never one that carries a request, nor one that is new: a server may accept many connections before it reads
what has arrived on the first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

NEW_S = 2.0  # for the first bytes of a connection's first request


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """How many connections a server has.

    unproven: of them, for callers that have not shown that they may use it; the rest of the places are for those that
    have. unproven_per_address: of those; connections that are new take more, while no other address needs the places.
    surplus: beyond `connections`; they are answered with 503, or with the server's health, instead of a reset.
    """

    connections: int = 512
    unproven: int = 384
    unproven_per_address: int = 64
    surplus: int = 64


@dataclass(slots=True, eq=False)
class ServedConnection:
    """One connection.

    owner: what closes it. idle_since: its last answer, or its begin. answered: it has had an answer. proven: a request
    on it had a valid token or key. busy: it carries a request. surplus: there was no place for it.
    """

    address: str
    owner: Any = field(default=None, repr=False)
    idle_since: float = 0.0
    answered: bool = False
    proven: bool = False
    busy: bool = False
    surplus: bool = False

    def is_new(self, now: float) -> bool:
        """Whether its caller may not have had the time to send a request."""
        return not self.answered and now - self.idle_since < NEW_S


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
