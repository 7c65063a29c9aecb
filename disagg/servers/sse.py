"""Server-sent events, and requests that end when their caller goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.errors import Cancelled

KEEPALIVE_S = 10.0
T = TypeVar("T")
Event = tuple[str, Mapping[str, Any]]


def encode(name: str, data: Mapping[str, Any]) -> bytes:
    """One event on the wire: its name and one line of JSON."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Streams (name, data) events; a comment line every KEEPALIVE_S while there are none.

    When the caller disconnects the generator is closed, so its `finally` blocks run at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Event, None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"Cache-Control": "no-store", **(headers or {})})
        self._events = events
        self._quiet = asyncio.Event()  # set: no event went out since the last look

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        with suppress(Cancelled):
            await until_disconnect(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        idle = asyncio.ensure_future(self._keep_alive(send))
        try:
            async with aclosing(self._events) as events:
                async for name, data in events:
                    self._quiet.clear()
                    await send({"type": "http.response.body", "body": encode(name, data), "more_body": True})
        finally:
            idle.cancel()
            await asyncio.wait((idle,))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._quiet.set()
            await asyncio.sleep(KEEPALIVE_S)
            if self._quiet.is_set():
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})


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


async def read_body(request: Request, limit: int) -> bytes | None:
    """The whole body, or None where it is longer than `limit` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            return None
    return bytes(body)
