"""The bytes of KV that a decode host may hold, and who waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

from disagg.errors import KVMemoryExceeded
from disagg.kv.arena import Reservation


class KVMemory:
    """Reservations of KV bytes within `limit`, first come, first served. Made on the event loop, freed on any thread.

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
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def reserved(self) -> int:
        return self._reserved

    @property
    def left(self) -> int:
        """Bytes that are neither reserved nor kept. Below 0 for a while when a full host ends an answer: its KV is kept
        before its reservation ends."""
        return self.limit - self._reserved - self._kept()

    def try_reserve(self, nbytes: int, cleanup: ExitStack) -> Reservation | None:
        """Reserve `nbytes` if there is room now and nobody waits. Closing `cleanup` ends the request's use of them.
        Raises KVMemoryExceeded if there can never be room."""
        if nbytes > self.limit:
            raise KVMemoryExceeded(
                f"prompt and answer need {nbytes} bytes of KV, this host has {self.limit} for all requests",
                "shorten the prompt, lower max_tokens, or raise max_kv_bytes of the decode host",
            )
        if self._waiting or not self._take(nbytes):
            return None
        return self._reservation(nbytes, cleanup)

    async def reserve(self, nbytes: int, cleanup: ExitStack) -> Reservation:
        """As `try_reserve`, but wait for room."""
        if (reservation := self.try_reserve(nbytes, cleanup)) is not None:
            return reservation
        loop = asyncio.get_running_loop()
        waiting = (nbytes, loop.create_future())
        self._waiting.append(waiting)
        try:
            await waiting[1]
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self.wake()  # it may have been the one that the others waited behind
            elif waiting[1].done() and not waiting[1].cancelled():
                self._free(loop, nbytes)
            raise
        return self._reservation(nbytes, cleanup)

    def wake(self) -> None:
        """Give room to those who wait: after a reservation was freed, or kept KV is no longer in use."""
        while self._waiting:
            nbytes, room = self._waiting[0]
            if room.cancelled():  # its request has ended, and has not run since
                self._waiting.popleft()
            elif self._take(nbytes):
                self._waiting.popleft()
                room.set_result(None)
            else:
                return

    def _reservation(self, nbytes: int, cleanup: ExitStack) -> Reservation:
        reservation = Reservation(nbytes, partial(self._free, asyncio.get_running_loop()))
        cleanup.callback(reservation.use())
        return reservation

    def _take(self, nbytes: int) -> bool:
        if nbytes > self.left:
            self._give_up(nbytes - self.left)
        if nbytes > self.left:  # only this thread reserves; what the engine's thread keeps meanwhile can be given up
            return False
        with self._lock:
            self._reserved += nbytes
        self._on_reserved()
        return True

    def _free(self, loop: asyncio.AbstractEventLoop, nbytes: int) -> None:
        """On any thread. Those who wait are woken on the event loop."""
        with self._lock:
            self._reserved -= nbytes
        with suppress(RuntimeError):  # the event loop is closed: nobody waits
            loop.call_soon_threadsafe(self.wake)
