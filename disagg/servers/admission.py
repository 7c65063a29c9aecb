"""A bounded queue in front of an engine: some requests run, some wait, the rest get 503."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack

from disagg.errors import Overloaded

MAX_RETRY_AFTER_S = 30


def retry_after(wait_s: float) -> int:
    """The Retry-After of a refused request that may find a place after `wait_s`: whole seconds, 1 to
    MAX_RETRY_AFTER_S."""
    return max(1, min(MAX_RETRY_AFTER_S, math.ceil(wait_s)))


class Admission:
    """At most `running_limit` requests run and `queue_limit` more wait, first come first served.

    A request first takes a place, then waits for its turn. Closing its `cleanup` stack releases both.
    """

    def __init__(self, running_limit: int, queue_limit: int) -> None:
        self.running_limit = running_limit
        self._turns = asyncio.Semaphore(running_limit)
        self.limit = running_limit + queue_limit  # of places
        self._admitted = 0
        self.running = 0

    @property
    def queued(self) -> int:
        """Requests that have a place and wait for their turn."""
        return self._admitted - self.running

    def take_place(self, cleanup: ExitStack) -> None:
        """Take a place until `cleanup` is closed. Raises Overloaded if there is none."""
        if self._admitted >= self.limit:
            raise Overloaded(
                f"the server's queue is full ({self.running} running, {self.queued} waiting)",
                "try again in a moment, or add a host for this model",
            )
        self._admitted += 1
        cleanup.callback(self._release_place)

    async def take_turn(self, cleanup: ExitStack) -> None:
        """Wait for a turn, and hold it until `cleanup` is closed."""
        await self._turns.acquire()
        self.running += 1
        cleanup.callback(self._release_turn)

    def _release_place(self) -> None:
        self._admitted -= 1

    def _release_turn(self) -> None:
        self.running -= 1
        self._turns.release()
