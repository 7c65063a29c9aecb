"""Streamed answers: `AsyncStream` for asyncio, `Stream` for synchronous code.

The request runs in a task of its own from the moment that the stream is made. That task reads the socket whether or
not the caller reads the stream, so that times are those of arrival.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, Self

from anyio.from_thread import BlockingPortal

from disagg.errors import Cancelled, RequestError
from disagg.inference.types import Chunk, Completion

Perform = Callable[[Callable[[Chunk], None]], Coroutine[Any, Any, Completion]]
"""Runs one request: delivers each chunk to the callback as it arrives, and returns the whole answer."""

Item = Chunk | Exception | None
"""What a stream's queue holds: chunks, then None if the answer is complete, else the reason why it is not."""


class _Reader:
    """Reads one answer; `texts` and `completion` are what has arrived of it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.completion: Completion | None = None

    async def read(self, perform: Perform, put: Callable[[Item], None]) -> None:
        """Run the request, and put its chunks and its end into a queue."""

        def deliver(chunk: Chunk) -> None:
            self.texts.append(chunk.text)
            put(chunk)

        end: Exception | None = Cancelled("the request was cancelled before its answer was complete")
        try:
            self.completion = await perform(deliver)
            end = None
        except Exception as error:  # noqa: BLE001 - raised where the stream is read
            end = error
        finally:
            put(end)


class _Stream:
    """What both kinds of stream have. The reader's task does not refer to the stream, so that a stream which is
    dropped without being closed is collected, and its request cancelled."""

    def __init__(self) -> None:
        self._reader = _Reader()
        self._ended = False

    @property
    def text(self) -> str:
        """The text that has arrived so far. It stays if the answer is cancelled or fails."""
        return "".join(self._reader.texts)

    @property
    def completion(self) -> Completion:
        """The whole answer with its metrics. RequestError if the answer is not complete."""
        if self._reader.completion is None:
            raise RequestError("the answer is not complete", "read the stream to its end before its completion")
        return self._reader.completion

    def _chunk(self, item: Item, stop: type[Exception]) -> Chunk:
        """The chunk that the queue held; at the end of the answer, raises its error, or `stop`."""
        if isinstance(item, Chunk):
            return item
        self._ended = True
        raise item or stop


class AsyncStream(_Stream):
    """An answer while it arrives: iterate it for its chunks. Leaving the block cancels a request that still runs.

    async with client.stream("qwen", "def add(a, b):") as stream:
        async for chunk in stream:
            print(chunk.text, end="")
    print(stream.completion.metrics.ttft)
    """

    def __init__(self, perform: Perform) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self._arrived = _Arrived()
        self._task = loop.create_task(self._reader.read(perform, self._arrived.put))
        weakref.finalize(self, _cancel, loop, self._task).atexit = False

    def waiting(self) -> list[Chunk]:
        """Take the chunks that have arrived since the last one was read. Waits for none, and raises nothing."""
        items, chunks = self._arrived.items, list[Chunk]()
        while items and isinstance(chunk := items[0], Chunk):
            chunks.append(chunk)
            items.popleft()
        return chunks

    async def aclose(self) -> None:
        """Cancel the request if it still runs; returns when its connections are closed. `text` stays."""
        self._ended = True
        self._task.cancel()
        await asyncio.wait((self._task,))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        items = self._arrived.items
        while not items:
            try:
                await self._arrived.more()
            except asyncio.CancelledError:
                self._task.cancel()  # at once: the traceback keeps the stream alive
                raise
        return self._chunk(items.popleft(), StopAsyncIteration)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Arrived:
    """What has arrived and was not read. A deque and a future for each reader that waits, mostly one: asyncio.Queue
    takes 3 us more for each item."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self._waiting: list[asyncio.Future[None]] = []

    def put(self, item: Item) -> None:
        self.items.append(item)
        while self._waiting:
            if not (waiter := self._waiting.pop()).done():
                waiter.set_result(None)

    async def more(self) -> None:
        """Wait for the next item. A second reader waits for the same one."""
        self._waiting.append(waiter := asyncio.get_running_loop().create_future())
        await waiter


class Stream(_Stream):
    """An answer while it arrives, for synchronous code: iterate it for its chunks. Leaving the block cancels a request
    that still runs.

    with client.stream("qwen", "def add(a, b):") as stream:
        for chunk in stream:
            print(chunk.text, end="")
    print(stream.completion.metrics.ttft)
    """

    def __init__(self, portal: BlockingPortal, perform: Perform) -> None:
        super().__init__()
        # Ctrl-C interrupts a wait in SimpleQueue.get, which waiting for the event loop's thread would not allow.
        self._queue: SimpleQueue[Item] = SimpleQueue()
        self._request = portal.start_task_soon(self._reader.read, perform, self._queue.put)
        weakref.finalize(self, self._request.cancel).atexit = False

    def close(self) -> None:
        """Cancel the request if it still runs. `text` stays."""
        self._ended = True
        self._request.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        try:
            return self._chunk(self._queue.get(), StopIteration)
        except BaseException:  # Ctrl-C. At once: the traceback keeps the stream alive
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    """Cancel a task from whichever thread collects its stream."""
    if not task.done() and not loop.is_closed():
        loop.call_soon_threadsafe(task.cancel)
