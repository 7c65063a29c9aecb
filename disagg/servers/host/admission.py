"""Which requests a host takes and how long they stay: a bounded queue in front of an engine, and leases.

Some requests run, some wait, the rest get 503. Keys share the host fairly. A request that its caller does not name
again in time ends: a caller that has ended without closing its connection, or that is cut off, cannot hold a place, a
ticket and KV for longer than its lease.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass

from disagg.api.requests import Share
from disagg.errors import Overloaded
from disagg.shares import Counted, Places, next_in_turn

MAX_RETRY_AFTER_S = 30


def retry_after(wait_s: float) -> int:
    """The Retry-After of a refused request that may find a place after `wait_s`: whole seconds, 1 to
    MAX_RETRY_AFTER_S."""
    return max(1, min(MAX_RETRY_AFTER_S, math.ceil(wait_s)))


class Turns:
    """`limit` turns at a time, for which requests wait. The next one is that of the key that has fewest for its weight,
    and of one key, of the request that came first.

    look_again_s: while some wait and turns are kept free: the keys for which they are kept are forgotten after a while.
    """

    def __init__(self, limit: int, look_again_s: float = 1.0) -> None:
        self.limit = limit
        self._look_again_s = look_again_s
        self._counted = Counted()
        self._waiting: list[tuple[Share, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def taken(self) -> int:
        return int(self._counted.total)

    async def take(self, share: Share, cleanup: ExitStack) -> None:
        """Wait for a turn, and have it until `cleanup` is closed."""
        waiting = (share, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._grant()
        try:
            await waiting[1]
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting[1].cancelled():
                self._give_back(share)
            raise
        cleanup.callback(self._give_back, share)

    def take_now(self, share: Share, cleanup: ExitStack) -> None:
        """Have a turn at once: somebody else has decided whose it is."""
        self._count(share, 1)
        cleanup.callback(self._give_back, share)

    def _give_back(self, share: Share) -> None:
        self._count(share, -1)
        self._grant()

    def _count(self, share: Share, turns: int) -> None:
        self._counted.see(share, time.monotonic())
        self._counted.add(share.key, turns)

    def _grant(self) -> None:
        """Give turns to those who wait, as long as there are some for them."""
        while self._waiting:
            now = time.monotonic()
            for share, _ in self._waiting:
                self._counted.see(share, now)
            keys = [share.key for share, _ in self._waiting]
            if (at := next_in_turn(self._counted.claims(now), keys, self.limit)) is None:
                self._look_again()
                return
            share, turn = self._waiting.pop(at)
            if not turn.cancelled():  # else its request has ended, and has not run since
                self._count(share, 1)
                turn.set_result(None)

    def _look_again(self) -> None:
        if self._timer is None and self.taken < self.limit:
            self._timer = asyncio.get_running_loop().call_later(self._look_again_s, self._look)

    def _look(self) -> None:
        self._timer = None
        self._grant()


class Admission:
    """At most `running_limit` requests run and `queue_limit` more wait.

    A request first takes a place, then waits for its turn. Closing its `cleanup` stack releases both.
    """

    def __init__(self, running_limit: int, queue_limit: int) -> None:
        self.running_limit = running_limit
        self.limit = running_limit + queue_limit  # of places
        self._places = Places(self.limit)
        self._turns = Turns(running_limit)

    @property
    def running(self) -> int:
        """Requests that have their turn."""
        return self._turns.taken

    @property
    def queued(self) -> int:
        """Requests that have a place and wait for their turn."""
        return max(0, self._places.taken - self.running)

    def take_place(
        self,
        share: Share,
        cleanup: ExitStack,
        waiting: Callable[[], bool] = lambda: False,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a place until `cleanup` is closed. Raises Overloaded if there is none. waiting, give_up: whether, and
        how, the place may be yielded to another key, as in Place."""
        place = self._places.take(share, 1, time.monotonic(), waiting=waiting, give_up=give_up)
        if place is None:
            kept = self.limit - self._places.taken
            are = "are" if kept > 1 else "is"
            for_others = f", and {kept} of its places {are} kept free for other keys" if kept else ""
            raise Overloaded(
                f"the server's queue is full ({self.running} running, {self.queued} waiting{for_others})",
                "try again in a moment, or add a host for this model",
            )
        cleanup.callback(lambda: self._places.give_back(place, time.monotonic()))

    async def take_turn(self, share: Share, cleanup: ExitStack) -> None:
        """Wait for a turn, and hold it until `cleanup` is closed."""
        await self._turns.take(share, cleanup)

    def start(self, share: Share, cleanup: ExitStack) -> None:
        """Hold a turn until `cleanup` is closed, which the caller's scheduler has given to this request."""
        self._turns.take_now(share, cleanup)


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
