"""Server-sent events, and requests that end when their caller disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg.api.events import EVENTS, ErrorEvent, Event
from disagg.errors import Cancelled, DisaggError
from disagg.servers import logs

KEEPALIVE_S = 10.0
STALL_S = 60.0  # a caller that reads nothing for this long counts as disconnected
INTERNAL_ERROR = DisaggError("internal error in the server", "its log has the traceback")
T = TypeVar("T")

_FIRST_LINE = {kind: f"event: {kind.event}\ndata: ".encode() for kind in (*EVENTS.values(), ErrorEvent)}
_to_json = msgspec.json.Encoder().encode


def encode(event: Event | ErrorEvent) -> bytes:
    """One event on the wire: its name and one line of JSON."""
    return _FIRST_LINE[type(event)] + _to_json(event) + b"\n\n"


class EventStream(Response):
    """Streams events; a comment line if KEEPALIVE_S pass without one.

    The response starts with its first event or comment. An error before that is answered by `on_error`, with the
    error's HTTP status; a later one is the last event. If the caller disconnects or stops reading, the generator is
    cancelled, and its `finally` blocks run at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Event, None], on_error: Callable[[DisaggError], ASGIApp]) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        self._events = events
        self._on_error = on_error
        self._started = False
        self._quiet = True  # nothing was sent since the keep-alive timer was set
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Cancelled):
            await until_disconnect(receive, self._write(scope, receive, send))

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        keep_alive = asyncio.ensure_future(self._keep_alive(send))
        try:
            async with aclosing(self._events):
                while (event := await self._next()) is not None:
                    if isinstance(event, DisaggError) and not self._started:
                        await self._on_error(event)(scope, receive, send)
                        return
                    self._quiet = False
                    await self._send(send, encode(ErrorEvent.of(event) if isinstance(event, DisaggError) else event))
        finally:
            keep_alive.cancel()
            await asyncio.wait((keep_alive,))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> Event | DisaggError | None:
        """The next event, the error that ended the generator, or None at its end."""
        try:
            return await anext(self._events, None)
        except DisaggError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a bug: the caller gets an error, the log the traceback
            logs.log.error("internal_error", exc_info=error)
            return INTERNAL_ERROR

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(KEEPALIVE_S)
            if self._quiet:
                await self._send(send, b": waiting\n\n")

    async def _send(self, send: Send, body: bytes) -> None:
        try:
            async with asyncio.timeout(STALL_S), self._sending:
                if not self._started:
                    self._started = True
                    headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
                    await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise Cancelled(f"the caller read nothing for {STALL_S:g} s") from None


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`. If the caller disconnects first, cancel it and raise Cancelled."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the caller disconnected")
        return task.result()
    finally:
        for unfinished in (task, disconnect):
            unfinished.cancel()
        await asyncio.wait((task, disconnect))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit: int, seconds: float) -> bytes | None:
    """The whole body, or None if it is longer than `limit` bytes. Raises TimeoutError after `seconds`."""
    body = bytearray()
    async with asyncio.timeout(seconds):
        async for part in request.stream():
            body += part
            if len(body) > limit:
                return None
    return bytes(body)
