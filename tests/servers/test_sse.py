"""disagg/servers/sse.py: events on the wire, errors before and after the first one, callers that disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import pytest

from disagg.api.events import ErrorEvent, Event, ProgressEvent, TokenLogprob, TokensEvent
from disagg.errors import DisaggError, Overloaded, ServerUnavailable
from disagg.http.server import error_response
from disagg.servers.host.request import Caller
from disagg.servers.sse import TIMES, EventStream, StreamTimes, encode, unfinished

EVENT = TokensEvent("a\nb", (TokenLogprob(7, -0.25),))


class Connection:
    """The ASGI side of one response: what was sent, and a `receive` that waits for `disconnect`."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.disconnect = asyncio.Event()
        self.stalled = False

    async def send(self, message: Any) -> None:
        if self.stalled:
            await asyncio.Event().wait()
        self.sent.append(message)

    async def receive(self) -> dict[str, Any]:
        await self.disconnect.wait()
        return {"type": "http.disconnect"}

    async def run(self, events: Callable[[Caller], AsyncGenerator[Event, None]], times: StreamTimes = TIMES) -> None:
        await EventStream(events, error_response, times=times)({"type": "http"}, self.receive, self.send)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_an_event_is_its_name_and_one_line_of_json() -> None:
    first, second, *rest = encode(EVENT).split(b"\n")
    assert (first, rest) == (b"event: tokens", [b"", b""])
    assert TokensEvent.from_bytes(second.removeprefix(b"data: ")) == EVENT


async def test_events_are_sent_in_order_and_the_response_ends() -> None:
    async def events() -> AsyncGenerator[Event, None]:
        yield EVENT
        yield EVENT

    connection = Connection()
    await connection.run(lambda _: events())
    assert connection.status == 200 and connection.body == encode(EVENT) * 2
    assert connection.sent[-1]["more_body"] is False


async def test_an_error_before_the_first_event_is_answered_with_its_http_status() -> None:
    async def events() -> AsyncGenerator[Event, None]:
        raise Overloaded("full", "wait")
        yield EVENT

    connection = Connection()
    await connection.run(lambda _: events())
    assert connection.status == 503 and json.loads(connection.body)["error"]["code"] == "Overloaded"


@pytest.mark.parametrize(
    ("error", "message"),
    [(DisaggError("it failed", "try again"), "it failed"), (ZeroDivisionError(), "internal error in the server")],
)
async def test_an_error_after_the_first_event_is_the_last_event(error: Exception, message: str) -> None:
    async def events() -> AsyncGenerator[Event, None]:
        yield EVENT
        raise error

    connection = Connection()
    await connection.run(lambda _: events())
    last = connection.body.removeprefix(encode(EVENT)).split(b"\n")
    assert connection.status == 200 and last[0] == b"event: error"
    assert ErrorEvent.from_bytes(last[1].removeprefix(b"data: ")).message == message


async def test_an_overloaded_error_after_the_first_event_carries_its_retry_after() -> None:
    async def events() -> AsyncGenerator[Event, None]:
        yield EVENT
        raise Overloaded("full", "wait")

    connection = Connection()
    stream = EventStream(lambda _: events(), error_response, retry_after_s=lambda: 7)
    await stream({"type": "http"}, connection.receive, connection.send)
    event = ErrorEvent.from_bytes(connection.body.partition(b"event: error\ndata: ")[2])
    error = DisaggError.from_json(event.to_json())
    assert isinstance(error, Overloaded) and error.retry_after_s == 7


async def endless(ended: list[str]) -> AsyncGenerator[Event, None]:
    try:
        yield EVENT
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


async def test_a_caller_that_disconnects_ends_the_generator() -> None:
    connection, ended = Connection(), list[str]()
    running = asyncio.ensure_future(connection.run(lambda _: endless(ended)))
    while not connection.sent:
        await asyncio.sleep(0)
    connection.disconnect.set()
    await running
    assert ended == ["ended"]


async def test_a_caller_that_reads_nothing_ends_the_generator() -> None:
    connection, ended = Connection(), list[str]()
    connection.stalled = True
    await connection.run(lambda _: endless(ended), StreamTimes(stall_s=0.01))
    assert ended == ["ended"]


async def test_a_progress_event_is_sent_while_there_is_no_other() -> None:
    connection, ended = Connection(), list[str]()
    stream = EventStream(lambda _: endless(ended), error_response, lambda: 42, times=StreamTimes(progress_s=0.001))
    running = asyncio.ensure_future(stream({"type": "http"}, connection.receive, connection.send))
    while b"event: progress\ndata: " not in connection.body:
        await asyncio.sleep(0.001)
    connection.disconnect.set()
    await running
    data = connection.body.partition(b"event: progress\ndata: ")[2].splitlines()[0]
    assert ProgressEvent.from_bytes(data) == ProgressEvent(phase="arriving", beats=42)


async def stuck(release: asyncio.Event, started: bool, caller: Caller) -> AsyncGenerator[Event, None]:
    """A request whose release waits for a stuck engine."""
    try:
        if started:
            yield EVENT
        asyncio.get_running_loop().call_soon(caller.end, ServerUnavailable("the engine is stuck"))
        await asyncio.Event().wait()
    finally:
        await release.wait()


@pytest.mark.parametrize("started", [True, False])
async def test_a_request_that_the_service_ends_is_answered_though_its_engine_is_stuck(started: bool) -> None:
    connection, release = Connection(), asyncio.Event()
    await connection.run(partial(stuck, release, started), StreamTimes(cleanup_s=0.05))
    assert connection.status == (200 if started else 502)
    assert b"the engine is stuck" in connection.body and not connection.sent[-1].get("more_body")
    release.set()
    while unfinished():
        await asyncio.sleep(0)
