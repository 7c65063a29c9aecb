"""Records finished requests: an observer with a bounded queue, and the one thread that writes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Final

from disagg.api.gateway import HistoryEntry
from disagg.gateway.watch.entry import entry_of_completion, entry_of_end
from disagg.gateway.watch.history import HistoryBounds, Store
from disagg.gateway.watch.request import ObservedRequest, Observer

QUEUED: Final = 4096  # entries that wait for the disk; more are dropped and counted
TOGETHER: Final = 256  # of one transaction
PRUNE_S: Final = 60.0
CLOSE_S: Final = 5.0

log = logging.getLogger("disagg.gateway")


class _Mark:
    """A place in the queue: `done` is called when everything before it is written."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done


class Recorder(Observer):
    """An observer that writes finished requests to a file. A disk that is full, or a file that is damaged, stops it
    with one line of log; requests go on.

    opened: opens the file, on the thread that writes. queued: entries that may wait for the disk. stopped: why it has
    stopped; None while it records. dropped: entries for which the queue had no room.
    """

    def __init__(
        self,
        path: Path,
        bounds: HistoryBounds = HistoryBounds(),  # noqa: B008 - frozen
        opened: Callable[[Path, HistoryBounds], Store] = Store,
        queued: int = QUEUED,
    ) -> None:
        self.path = path
        self.stopped: str | None = None
        self.dropped = 0
        self._open = partial(opened, path, bounds)
        self._over = False  # the thread has taken the closing None
        self._queue: Queue[HistoryEntry | _Mark | None] = Queue(queued)
        self._thread = threading.Thread(target=self._write, name="history", daemon=True)
        self._thread.start()

    def completed(self, request: ObservedRequest, choice: int) -> None:
        self._put(entry_of_completion(request, choice))

    def ended(self, request: ObservedRequest) -> None:
        if (entry := entry_of_end(request)) is not None:
            self._put(entry)

    async def settle(self) -> None:
        """Return when all events so far are in the file, or nothing is recorded any more."""
        if self.stopped is not None:
            return
        loop, written = asyncio.get_running_loop(), asyncio.Event()

        def done() -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(written.set)

        try:
            self._queue.put_nowait(_Mark(done))
        except Full:
            return
        await written.wait()

    def close(self) -> None:
        """Write what is queued, and end."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except Full:
            return
        self._thread.join(CLOSE_S)

    def _put(self, entry: HistoryEntry) -> None:
        if self.stopped is not None:
            return
        try:
            self._queue.put_nowait(entry)
        except Full:
            self.dropped += 1
            if self.dropped == 1:
                log.error("history: the disk is too slow, entries are dropped")

    def _write(self) -> None:
        """The thread: until `close`, or an error; then only marks are answered."""
        try:
            with closing(self._open()) as store:
                self._record(store)
            return
        except Exception as error:  # noqa: BLE001 - whatever fails here, requests go on
            self.stopped = f"{self.path}: {error}"
            log.error("history: nothing is recorded any more: %s", self.stopped)
        while not self._over and (item := self._queue.get()) is not None:
            if isinstance(item, _Mark):
                item.done()

    def _record(self, store: Store) -> None:
        pruned = 0.0
        while True:
            entries, marks, self._over = self._next()
            try:
                if entries:
                    store.append(entries)
                if time.monotonic() - pruned >= PRUNE_S or not pruned:
                    store.prune(time.time())
                    pruned = time.monotonic()
            finally:
                for mark in marks:
                    mark.done()
            if self._over:
                return

    def _next(self) -> tuple[list[HistoryEntry], list[_Mark], bool]:
        """What is queued, at least one item: entries, marks, and whether it is the end."""
        items = [self._queue.get()]
        with suppress(Empty):
            while items[-1] is not None and len(items) < TOGETHER:
                items.append(self._queue.get_nowait())
        entries = [one for one in items if isinstance(one, HistoryEntry)]
        return entries, [one for one in items if isinstance(one, _Mark)], items[-1] is None
