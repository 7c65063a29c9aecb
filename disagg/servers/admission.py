"""A bounded queue in front of an engine: who waits, who runs, and 503 for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from disagg.errors import Overloaded


class Admission:
    """At most `running_limit` requests run and `queue_limit` more wait, first come first served."""

    def __init__(self, running_limit: int, queue_limit: int) -> None:
        self._slots = asyncio.Semaphore(running_limit)
        self._limit = running_limit + queue_limit
        self._inside = 0
        self.running = 0

    @property
    def queued(self) -> int:
        return self._inside - self.running

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold a place, waiting or running; Overloaded when there is none."""
        if self._inside >= self._limit:
            raise Overloaded(
                f"the server's queue is full ({self.running} running, {self.queued} waiting)",
                "try again in a moment, or add a host for this model",
            )
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for one's turn inside `place`, and run."""
        async with self._slots:
            self.running += 1
            try:
                yield
            finally:
                self.running -= 1
