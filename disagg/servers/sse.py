"""Server-sent events, and requests that end when their caller disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from disagg import logs
from disagg.api.events import EVENTS, ErrorEvent, Event, ProgressEvent
from disagg.errors import Cancelled, DisaggError
from disagg.http.requests import REQUEST_ID_KEY, disconnected
from disagg.http.server import INTERNAL_ERROR
from disagg.http.stream import EVENT_STREAM, BodyParts, running
from disagg.servers.host.request import Caller

_FIRST_LINE = {kind: f"event: {kind.event}\ndata: ".encode() for kind in (*EVENTS.values(), ErrorEvent)}
_to_json = msgspec.json.Encoder().encode
_still_ending: set[asyncio.Task[None]] = set()


def encode(event: Event | ErrorEvent) -> bytes:
    """One event on the wire: its name and one line of JSON."""
    return _FIRST_LINE[type(event)] + _to_json(event) + b"\n\n"


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """How long a stream waits, in seconds."""

    progress_s: float = 1.0  # without another event, a progress event is sent
    stall_s: float = 30.0  # a caller that reads nothing for this long counts as disconnected
    cleanup_s: float = 5.0  # a request that still holds something then releases it without its stream waiting for it


TIMES = StreamTimes()


class EventStream(Response):
    """Streams events; a progress event if so much time passes without one.

    The response starts with its first event. An error before that is answered by `on_error`, with the error's HTTP
    status; a later one is the last event. If the caller disconnects or stops reading, the generator is cancelled, and
    its `finally` blocks run at once. If the service ends the request, the caller gets its error without waiting for
    them: the engine that they wait for may be stuck. beats: for progress events. retry_after_s: for Overloaded.
    events: the events for a caller, which is also sent events at once, between those.
    """

    def __init__(
        self,
        events: Callable[[Caller], AsyncGenerator[Event, None]],
        on_error: Callable[[DisaggError], ASGIApp],
        beats: Callable[[], int] = lambda: 0,
        retry_after_s: Callable[[], int] = lambda: 1,
        times: StreamTimes = TIMES,
    ) -> None:
        super().__init__()
        self._events = events
        self._on_error = on_error
        self._beats = beats
        self._retry_after_s = retry_after_s
        self._times = times

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = BodyParts(scope, send, EVENT_STREAM, self._times.stall_s)

        def send_now(events: Callable[[], Sequence[Event]]) -> bool:
            if ready := parts.ready:
                for event in events():
                    parts.write(encode(event))
            return ready

        self._caller = Caller(scope.get(REQUEST_ID_KEY, ""), lambda: parts.part(self._progress()), send_now)
        writing = asyncio.ensure_future(self._write(parts, scope, receive, send))
        keep_alive = parts.keep_alive(self._progress, self._times.progress_s, self._times.progress_s)
        try:
            async with running(disconnected(receive), keep_alive) as others:
                ends: tuple[asyncio.Future[Any], ...] = (writing, *others, self._caller.ended)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = await _ended(writing, self._times.cleanup_s)
        if (error := self._caller.error) is not None and (not ended or writing.cancelled()):
            await self._end(parts, error, scope, receive, send)
        elif ended and not writing.cancelled():
            with suppress(Cancelled):
                writing.result()

    async def _write(self, parts: BodyParts, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events(self._caller)) as events:
            while (event := await self._next(events)) is not None:
                if isinstance(event, DisaggError) and not parts.started:
                    await self._on_error(event)(scope, receive, send)
                    return
                await parts.part(encode(self._error(event) if isinstance(event, DisaggError) else event))
        await parts.end()

    async def _next(self, events: AsyncGenerator[Event, None]) -> Event | DisaggError | None:
        """The next event, the error that ended the generator, or None at its end."""
        try:
            return await anext(events, None)
        except DisaggError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a bug: the caller gets an error, the log the traceback
            logs.log.error("internal_error", exc_info=error)
            return INTERNAL_ERROR

    def _progress(self) -> bytes:
        self._caller.stated = self._caller.phase
        return encode(ProgressEvent(phase=self._caller.stated, beats=self._beats()))

    async def _end(self, parts: BodyParts, error: DisaggError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the error for which the service has ended the request."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._times.cleanup_s):
                if not parts.started:
                    await self._on_error(error)(scope, receive, send)
                    return
                await parts.end(encode(self._error(error)))

    def _error(self, error: DisaggError) -> ErrorEvent:
        return ErrorEvent.of(error, self._retry_after_s())


async def _ended(task: asyncio.Task[None], cleanup_s: float) -> bool:
    """Cancel the task unless it has ended, and wait up to cleanup_s. False if it still runs: it releases what it holds
    when it can."""
    task.cancel()
    await asyncio.wait((task,), timeout=cleanup_s)
    if task.done():
        return True
    logs.event(logging.WARNING, "request_stuck", seconds=cleanup_s)
    _still_ending.add(task)
    task.add_done_callback(_forget)
    return False


def unfinished() -> int:
    """How many requests were answered and still have not released what they hold."""
    return len(_still_ending)


def _forget(task: asyncio.Task[None]) -> None:
    _still_ending.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logs.event(logging.INFO, "request_ended_late", reason=repr(error))
