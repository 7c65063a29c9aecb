"""Server-sent events, and requests that end when their caller goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg.errors import Cancelled

KEEPALIVE_S = 10.0
STALL_S = 60.0  # a caller that takes nothing for so long has gone
T = TypeVar("T")
Event = tuple[str, Mapping[str, Any]]
_to_json = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps makes a new encoder for every event


def encode(name: str, data: Mapping[str, Any]) -> bytes:
    """One event on the wire: its name and one line of JSON."""
    return f"event: {name}\ndata: {_to_json(data)}\n\n".encode()


class EventStream(Response):
    """Streams (name, data) events; a comment line whenever KEEPALIVE_S pass without one.

    The response begins with its first event or comment. Where the first event is an `error`, and nothing has gone out
    yet, `on_error` makes the response instead, with the error's own HTTP status. When the caller disconnects or stops
    reading, the generator is closed, so its `finally` blocks run at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Event, None], on_error: Callable[[Mapping[str, Any]], ASGIApp]) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        self._events = events
        self._on_error = on_error
        self._begun = False
        self._quiet = True  # no event went out since the last look
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Cancelled):
            await until_disconnect(receive, self._write(scope, receive, send))

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        idle = asyncio.ensure_future(self._keep_alive(send))
        try:
            async with aclosing(self._events) as events:
                async for name, data in events:
                    if name == "error" and not self._begun:
                        await self._on_error(data)(scope, receive, send)
                        return
                    self._quiet = False
                    await self._send(send, encode(name, data))
        finally:
            idle.cancel()
            await asyncio.wait((idle,))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(KEEPALIVE_S)
            if self._quiet:
                await self._send(send, b": waiting\n\n")

    async def _send(self, send: Send, body: bytes) -> None:
        try:
            async with asyncio.timeout(STALL_S), self._sending:
                if not self._begun:
                    self._begun = True
                    headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
                    await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise Cancelled(f"the caller read nothing for {STALL_S:g} s") from None


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it and raise Cancelled when the caller disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the caller disconnected")
        return task.result()
    finally:
        for unfinished in (task, gone):
            unfinished.cancel()
        await asyncio.wait((task, gone))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit: int, seconds: float) -> bytes | None:
    """The whole body, or None where it is longer than `limit` bytes; TimeoutError where it takes over `seconds`."""
    body = bytearray()
    async with asyncio.timeout(seconds):
        async for part in request.stream():
            body += part
            if len(body) > limit:
                return None
    return bytes(body)
