"""Leases of requests: a request that its caller does not name again in time ends.

A caller that has ended without closing its connection, or that is cut off, cannot hold a place, a ticket and KV for
longer than its lease.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _Lease:
    request_id: str
    lease_s: float
    ends: float
    expire: Callable[[], object]


class Leases:
    """The leases of one server's requests, by a key that is unique per request. Times are time.monotonic().

    Two requests may have the same id: a caller that tries again uses it while the first attempt still ends.
    """

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}

    def take(self, key: str, request_id: str, lease_s: float, now: float, expire: Callable[[], object]) -> None:
        """Begin a lease. `expire` is called once if it ends."""
        self._leases[key] = _Lease(request_id, lease_s, now + lease_s, expire)

    def drop(self, key: str) -> None:
        """The request has ended. Unknown keys are ignored."""
        self._leases.pop(key, None)

    def extend(self, request_ids: Collection[str], now: float) -> None:
        """Begin the leases of these requests anew."""
        wanted = frozenset(request_ids)
        for lease in self._leases.values():
            if lease.request_id in wanted:
                lease.ends = now + lease.lease_s

    def expire(self, now: float) -> None:
        """End what was not extended in time."""
        for key, lease in list(self._leases.items()):
            if lease.ends <= now:
                del self._leases[key]
                lease.expire()
