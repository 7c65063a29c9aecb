"""A bounded queue in front of an engine: who waits, who runs, and 503 for the rest."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from disagg.errors import Overloaded


class Admission:
    """At most `running_limit` requests run and `queue_limit` more wait, first come first served.

    A request first takes a place, then waits for its turn. Both are given back by closing the stack they were put on.
    """

    def __init__(self, running_limit: int, queue_limit: int) -> None:
        self._turns = asyncio.Semaphore(running_limit)
        self._limit = running_limit + queue_limit
        self._inside = 0
        self.running = 0

    @property
    def queued(self) -> int:
        """Requests that hold a place but do not run."""
        return self._inside - self.running

    def take_place(self, held: ExitStack) -> None:
        """Put a place on `held`; Overloaded when there is none."""
        if self._inside >= self._limit:
            raise Overloaded(
                f"the server's queue is full ({self.running} running, {self.queued} waiting)",
                "try again in a moment, or add a host for this model",
            )
        self._inside += 1
        held.callback(self._leave)

    async def take_turn(self, held: ExitStack) -> None:
        """Wait for one's turn and put it on `held`."""
        await self._turns.acquire()
        self.running += 1
        held.callback(self._end_turn)

    def _leave(self) -> None:
        self._inside -= 1

    def _end_turn(self) -> None:
        self.running -= 1
        self._turns.release()
