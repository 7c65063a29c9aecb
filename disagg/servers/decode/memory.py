"""The bytes of KV that a decode host may hold, and who waits for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

from disagg.api.requests import Share
from disagg.errors import KVMemoryExceeded
from disagg.kv.arena import Reservation
from disagg.shares import Counted, least


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for so many bytes."""

    nbytes: int
    share: Share
    room: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class KVMemory:
    """Reservations of KV bytes within `limit`. Next is the key that has least for its weight, and of one key, the first
    comer. Made on the event loop, freed on any thread.

    A request reserves the KV of its prompt and of its longest answer before any of it is computed or sent, so that none
    is refused after the work. kept: bytes of KV of finished requests; they count, and `give_up(nbytes)` frees them if a
    request needs their room. on_reserved: called after each reservation, which leaves less room.
    """

    def __init__(
        self,
        limit: int,
        kept: Callable[[], int],
        give_up: Callable[[int], None],
        on_reserved: Callable[[], None] = lambda: None,
    ) -> None:
        self.limit = limit
        self._reserved = 0
        self._lock = threading.Lock()
        self._kept = kept
        self._give_up = give_up
        self._on_reserved = on_reserved
        self._counted = Counted()
        self._waiting: list[_Waiting] = []

    @property
    def reserved(self) -> int:
        return self._reserved

    @property
    def left(self) -> int:
        """Bytes that are neither reserved nor kept. Below 0 for a while when a full host ends an answer: its KV is kept
        before its reservation ends."""
        return self.limit - self._reserved - self._kept()

    def try_reserve(self, nbytes: int, share: Share, cleanup: ExitStack) -> Reservation | None:
        """Reserve `nbytes` if there is room now and nobody waits. Closing `cleanup` ends the request's use of them.
        Raises KVMemoryExceeded if there can never be room."""
        if nbytes > self.limit:
            raise KVMemoryExceeded(
                f"prompt and answer need {nbytes} bytes of KV, this host has {self.limit} for all requests",
                "shorten the prompt, lower max_tokens, or raise max_kv_bytes of the decode host",
            )
        if self._waiting or not self._take(nbytes, share):
            return None
        return self._reservation(nbytes, share, cleanup)

    async def reserve(self, nbytes: int, share: Share, cleanup: ExitStack) -> Reservation:
        """Reserve memory as `try_reserve` does, but wait for room."""
        if (reservation := self.try_reserve(nbytes, share, cleanup)) is not None:
            return reservation
        waiting = _Waiting(nbytes, share)
        self._waiting.append(waiting)
        self.wake()  # it may be next, and fit
        try:
            await waiting.room
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self.wake()  # it may have been the one that the others waited behind
            elif waiting.room.done() and not waiting.room.cancelled():
                self._free(asyncio.get_running_loop(), share, nbytes)
            raise
        return self._reservation(nbytes, share, cleanup)

    def wake(self) -> None:
        """Give room to those who wait: after a reservation was freed, or kept KV is no longer in use."""
        self._waiting = [
            one for one in self._waiting if not one.room.cancelled()
        ]  # those have ended, and not run since
        while self._waiting:
            one = self._waiting[self._next()]
            if not self._take(one.nbytes, one.share):
                return
            self._waiting.remove(one)
            one.room.set_result(None)

    def _next(self) -> int:
        now = time.monotonic()
        with self._lock:
            for one in self._waiting:
                self._counted.see(one.share, now)
            return least(self._counted.claims(now), [one.share.key for one in self._waiting])

    def _reservation(self, nbytes: int, share: Share, cleanup: ExitStack) -> Reservation:
        reservation = Reservation(nbytes, partial(self._free, asyncio.get_running_loop(), share))
        cleanup.callback(reservation.use())
        return reservation

    def _take(self, nbytes: int, share: Share) -> bool:
        if nbytes > self.left:
            self._give_up(nbytes - self.left)
        if nbytes > self.left:  # only this thread reserves; what the engine's thread keeps meanwhile can be given up
            return False
        self._count(nbytes, share)
        self._on_reserved()
        return True

    def _count(self, nbytes: int, share: Share) -> None:
        with self._lock:
            self._reserved += nbytes
            self._counted.see(share, time.monotonic())
            self._counted.add(share.key, nbytes)

    def _free(self, loop: asyncio.AbstractEventLoop, share: Share, nbytes: int) -> None:
        """A reservation has ended, on any thread: those who wait are woken on the event loop."""
        self._count(-nbytes, share)
        with suppress(RuntimeError):  # the event loop is closed: nobody waits
            loop.call_soon_threadsafe(self.wake)
