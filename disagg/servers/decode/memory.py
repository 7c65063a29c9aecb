"""The bytes of KV that a decode host may hold, and who waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from disagg.errors import KVMemoryExceeded


class KVMemory:
    """Reservations of KV bytes within `limit`, first come, first served. Used on the event loop.

    A request reserves the KV of its prompt and of its longest answer before any of it is computed or sent, so that none
    is refused after the work. kept: bytes of KV of finished requests; they count, and `give_up(nbytes)` frees them if a
    request needs their room.
    """

    def __init__(self, limit: int, kept: Callable[[], int], give_up: Callable[[int], None]) -> None:
        self.limit = limit
        self.reserved = 0
        self._kept = kept
        self._give_up = give_up
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def left(self) -> int:
        """Bytes that are neither reserved nor kept."""
        return self.limit - self.reserved - self._kept()

    def try_reserve(self, nbytes: int, cleanup: ExitStack) -> bool:
        """Reserve `nbytes` until `cleanup` is closed, if there is room now and nobody waits. Raises KVMemoryExceeded if
        there can never be."""
        if nbytes > self.limit:
            raise KVMemoryExceeded(
                f"prompt and answer need {nbytes} bytes of KV, this host has {self.limit} for all requests",
                "shorten the prompt, lower max_tokens, or raise max_kv_bytes of the decode host",
            )
        if self._waiting or not self._take(nbytes):
            return False
        cleanup.callback(self._release, nbytes)
        return True

    async def reserve(self, nbytes: int, cleanup: ExitStack) -> None:
        """As `try_reserve`, but wait for room."""
        if self.try_reserve(nbytes, cleanup):
            return
        waiting = (nbytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await waiting[1]
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self.wake()  # it may have been the one that the others waited behind
            elif waiting[1].done() and not waiting[1].cancelled():
                self._release(nbytes)
            raise
        cleanup.callback(self._release, nbytes)

    def wake(self) -> None:
        """Give room to those who wait: after a reservation was released, or kept KV is no longer in use."""
        while self._waiting:
            nbytes, room = self._waiting[0]
            if room.cancelled():  # its request has ended, and has not run since
                self._waiting.popleft()
            elif self._take(nbytes):
                self._waiting.popleft()
                room.set_result(None)
            else:
                return

    def _take(self, nbytes: int) -> bool:
        if nbytes > self.left:
            self._give_up(nbytes - self.left)
        if nbytes > self.left:
            return False
        self.reserved += nbytes
        return True

    def _release(self, nbytes: int) -> None:
        self.reserved -= nbytes
        self.wake()
