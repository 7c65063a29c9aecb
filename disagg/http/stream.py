"""A response that is sent in parts while it is made: keep-alive, callers that stop reading, callers that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from disagg.errors import Cancelled
from disagg.http.requests import disconnected

T = TypeVar("T")
EVENT_STREAM: Final = "text/event-stream"
PART_WRITER: Final = "part_writer"
"""The PartWriter of a response, in the state of an ASGI scope; absent without our server, as in tests."""


class PartWriter(Protocol):
    """Writes parts of a response without a task to wait in: a token then wakes no task of its own. After the head."""

    @property
    def writable(self) -> bool:
        """Whether its caller takes more now."""
        ...

    def write_part(self, part: bytes) -> None:
        """Write a part of a body in chunks, at once."""
        ...


def event_bytes(data: bytes, name: str = "") -> bytes:
    """One server-sent event. data: one line."""
    first_line = b"event: " + name.encode() + b"\n" if name else b""
    return first_line + b"data: " + data + b"\n\n"


class BodyParts:
    """Sends one response. Its head goes with the first part, so that an error before it can have its own HTTP status.
    Starlette's StreamingResponse takes 0.9 us for a part instead of 0.3, begins with the head, keeps nothing alive and
    waits for a caller for ever.

    started: its head has been sent. stall_s: a caller that takes nothing for this long counts as disconnected.
    """

    def __init__(self, scope: Scope, send: Send, media_type: str, stall_s: float) -> None:
        self.started = False
        self.send, self._media_type, self._stall_s = send, media_type, stall_s
        self._writer: PartWriter | None = scope.get("state", {}).get(PART_WRITER)
        self._over = False
        self._quiet = True  # nothing was sent since `keep_alive` looked last
        self._sending = asyncio.Lock()
        self._unsent = 0  # parts that are being sent, or wait for that: the lock is free for a moment between two

    @property
    def ready(self) -> bool:
        """Whether `write` can send a part now."""
        return (
            self.started and not self._over and not self._unsent and self._writer is not None and self._writer.writable
        )

    def write(self, part: bytes) -> None:
        """Send a part at once; only if it is `ready`."""
        assert self._writer is not None, "not ready"
        self._quiet = False
        self._writer.write_part(part)

    async def part(self, part: bytes) -> None:
        """Send a part. Raises Cancelled if the caller stalls."""
        if not part:
            return
        if self.ready:
            self.write(part)
        else:
            self._quiet = False
            await self._body(part, more=True)

    async def end(self, part: bytes = b"") -> None:
        """Send the last part and end the response. Raises Cancelled if the caller stalls."""
        await self._body(part, more=False)

    async def keep_alive(self, part: Callable[[], bytes], first_s: float, every_s: float) -> None:
        """Send `part()` whenever so much time has passed without another part, until the response ends."""
        seconds = first_s
        while not self._over:
            self._quiet = True
            await asyncio.sleep(seconds)
            if self._quiet:
                await self._body(part(), more=True)
            seconds = every_s

    async def _body(self, part: bytes, *, more: bool) -> None:
        self._unsent += 1
        try:
            async with asyncio.timeout(self._stall_s), self._sending:
                if self._over:  # a part of `keep_alive` that waited for the end to be sent
                    return
                if not self.started:
                    self.started = True
                    headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-store")]
                    await self.send({"type": "http.response.start", "status": 200, "headers": headers})
                self._over = not more
                await self.send({"type": "http.response.body", "body": part, "more_body": more})
        except TimeoutError:
            raise Cancelled(f"the caller read nothing for {self._stall_s:g} s") from None
        finally:
            self._unsent -= 1


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[tuple[asyncio.Task[Any], ...]]:
    """Run side by side until the block ends; then what still runs is cancelled, and its end waited for."""
    tasks = tuple(asyncio.ensure_future(one) for one in work)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # looked at, or asyncio logs it; whoever needs it asks the task


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive, what: str) -> T:
    """What `work` returns. If the caller of `what` disconnects first, the work is cancelled, and Cancelled raised."""
    async with running(work, disconnected(receive)) as (working, left):
        await asyncio.wait((working, left), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled(f"the caller of {what} disconnected")
        result: T = working.result()
        return result
