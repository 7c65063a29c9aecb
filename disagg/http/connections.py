"""Which connection a server closes for a new one when there are too many. Pure; times are time.monotonic().

A caller proves itself with a token or key, once per connection. Those that have not cannot lock out those that have,
or will: they have places of their own, and few per address. A new connection takes the place of the least useful one,
which is never one that carries a request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """How many connections a server has.

    unproven: of them, for callers that have not shown that they may use it; the rest of the places are for those that
    have. unproven_per_address: of those. surplus: beyond `connections`; they are answered with 503, or with the
    server's health, instead of a reset.
    """

    connections: int = 512
    unproven: int = 384
    unproven_per_address: int = 64
    surplus: int = 64


@dataclass(slots=True, eq=False)
class ServedConnection:
    """One connection.

    owner: what closes it. proven: a request on it had a valid token or key. busy: it carries a request. surplus: there
    was no place for it.
    """

    address: str
    owner: Any = field(default=None, repr=False)
    idle_since: float = 0.0
    proven: bool = False
    busy: bool = False
    surplus: bool = False


def make_room(
    new: ServedConnection, others: Collection[ServedConnection], bounds: ConnectionBounds
) -> ServedConnection | None:
    """The connection to close for the new one, if any. Marks the new one as surplus if there is no room."""
    kept = [one for one in others if not one.surplus]
    unproven = [one for one in kept if not one.proven]
    of_address = [one for one in unproven if one.address == new.address]
    if len(of_address) >= bounds.unproven_per_address:
        crowd: Iterable[ServedConnection] = of_address
    elif len(unproven) >= bounds.unproven:
        crowd = unproven
    elif len(kept) >= bounds.connections:
        crowd = kept
    else:
        return None
    if (victim := least_useful(crowd)) is not None:
        return victim
    new.surplus = True
    surplus = [one for one in others if one.surplus]
    return least_useful(surplus) if len(surplus) >= bounds.surplus else None


def least_useful(connections: Iterable[ServedConnection]) -> ServedConnection | None:
    """The unproven connection that has been idle for longest, else the proven one; None if all carry requests."""
    idle = (one for one in connections if not one.busy)
    return min(idle, key=lambda one: (one.proven, one.idle_since), default=None)
