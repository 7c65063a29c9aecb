"""What requests make a host compute beside its engine: on which threads, and never more than a few at a time.

Nothing else runs on these threads: health, load, status and cancellation wait for none of it. The most that each kind
of work takes is a table of `tests/hostile/work.py`, in which a new parser or option of requests has a row.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from disagg.api.requests import Share
from disagg.servers.host.admission import Turns

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkBounds:
    """threads: pieces of work at a time. More would help little, as templates and much of the rest are Python, and each
    may need hundreds of MiB. stuck_s: a thread that works on one piece for longer is stuck: the longest takes 20 s.
    Those who wait are not bounded here: each has a place in the host's queue."""

    threads: int = 4
    stuck_s: float = 60.0


BOUNDS: Final = WorkBounds()


class RequestWork:
    """Runs the work of requests. Keys take turns as everywhere on a host: one with many long prompts does not hold up
    the others'."""

    def __init__(self, bounds: WorkBounds = BOUNDS) -> None:
        self.bounds = bounds
        self._turns = Turns(bounds.threads)
        self._begun: dict[object, float] = {}  # when each running piece began

    async def run(self, share: Share, work: Callable[[], T]) -> T:
        """What `work` returns. A caller that is cancelled while it waits leaves the queue. Work that has begun goes on
        without its caller, and keeps its thread until it ends."""
        turn = ExitStack()
        await self._turns.take(share, turn)
        piece = object()
        self._begun[piece] = time.monotonic()
        running = asyncio.ensure_future(on_daemon_thread(work, "request-work"))

        def ended(task: asyncio.Task[T]) -> None:
            del self._begun[piece]
            turn.close()
            if not task.cancelled():
                task.exception()  # else asyncio logs the error of a piece whose caller has left

        running.add_done_callback(ended)
        return await asyncio.shield(running)

    def stuck_s(self, now: float) -> float:
        """The seconds for which every thread has worked on one piece, if that is over the bound; else 0. now:
        time.monotonic()."""
        if len(self._begun) < self.bounds.threads:
            return 0.0
        shortest = now - max(self._begun.values())
        return shortest if shortest > self.bounds.stuck_s else 0.0

    def excuse(self, now: float) -> None:
        """Do not count the time before `now`: the whole process was stopped."""
        self._begun = dict.fromkeys(self._begun, now)


async def on_daemon_thread(work: Callable[[], T], name: str) -> T:
    """Run `work` on a daemon thread and return its result.

    A stopping process does not wait for it: loading a model takes minutes, and stopping it loses nothing. If the
    caller is cancelled, the thread runs on and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(end: Callable[[], None]) -> None:
        if not future.done():
            end()

    def run() -> None:
        try:
            end = partial(future.set_result, work())
        except BaseException as failure:  # noqa: BLE001 - it is raised where the future is awaited
            end = partial(future.set_exception, failure)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, end)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
