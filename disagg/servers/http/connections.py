"""Which connections a server keeps when there are too many. Pure; times are time.monotonic().

A caller proves itself with the fleet's token, once per connection. Those that have not cannot lock out those that have,
or will: they have places of their own, and few per address. A new connection takes the place of the least useful one,
which is never one that carries a request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_CONNECTIONS = 512
MAX_UNPROVEN = 384
"""The rest of the places are for callers that have shown the token."""
MAX_UNPROVEN_PER_ADDRESS = 64
MAX_SURPLUS = 64
"""Connections beyond MAX_CONNECTIONS that are answered with 503, or with their health, instead of a reset."""


@dataclass(slots=True, eq=False)
class Connection:
    """One connection. owner: what closes it. proven: a request on it had the fleet's token. busy: it carries a request.
    surplus: there was no place for it."""

    address: str
    owner: Any = field(default=None, repr=False)
    idle_since: float = 0.0
    proven: bool = False
    busy: bool = False
    surplus: bool = False


def make_room(new: Connection, others: Collection[Connection]) -> Connection | None:
    """The connection to close for the new one, if any. Marks the new one as surplus if there is no room."""
    kept = [one for one in others if not one.surplus]
    unproven = [one for one in kept if not one.proven]
    here = [one for one in unproven if one.address == new.address]
    if len(here) >= MAX_UNPROVEN_PER_ADDRESS:
        crowd: Iterable[Connection] = here
    elif len(unproven) >= MAX_UNPROVEN:
        crowd = unproven
    elif len(kept) >= MAX_CONNECTIONS:
        crowd = kept
    else:
        return None
    if (victim := least_useful(crowd)) is not None:
        return victim
    new.surplus = True
    surplus = [one for one in others if one.surplus]
    return least_useful(surplus) if len(surplus) >= MAX_SURPLUS else None


def least_useful(connections: Iterable[Connection]) -> Connection | None:
    """The unproven connection that has been idle for longest, else the proven one; None if all carry requests."""
    idle = (one for one in connections if not one.busy)
    return min(idle, key=lambda one: (one.proven, one.idle_since), default=None)
