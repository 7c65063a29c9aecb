"""Requests to the servers: JSON answers and event streams. Every failure is a DisaggError that names the host."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

import h11
import msgspec

from disagg.api.base import Contract, InvalidValue
from disagg.api.events import DoneEvent, ErrorAnswer, Event, ShippedEvent
from disagg.config import Host
from disagg.errors import MAX_RETRY_AFTER_S, DisaggError, Overloaded, ServerSilent, ServerUnavailable
from disagg.inference.http.connections import Connections, HostRequest, SentRequest
from disagg.inference.http.events import MAX_EVENT_BYTES, UNLIMITED, Patience, ProgressJudge, parse
from disagg.inference.policy import DEFAULT_POLICY, Timeouts

LAST_EVENTS: Final = (DoneEvent, ShippedEvent)

T = TypeVar("T", bound=Event)


@dataclass(slots=True)
class EventCall:
    """A POST to one host that is answered with events. Times by time.monotonic(), 0 until they are known: `written`, it
    was about to be written to an open connection; `last_sign`, the host sent the last piece of its answer. phase: the
    last one that the host has stated. reported: is called with each; what it raises ends the call. patience: with the
    host's queue."""

    host: Host
    path: str
    body: msgspec.Struct
    request_id: str
    timeouts: Timeouts = DEFAULT_POLICY.timeouts
    written: float = 0.0
    last_sign: float = 0.0
    phase: str = ""
    reported: Callable[[str], None] | None = None
    patience: Patience = UNLIMITED


async def get(http: Connections, host: Host, path: str, *, timeout: float) -> dict[str, Any]:
    """GET a JSON object; `timeout` bounds connecting, and every wait. Raises the server's own error, or
    ServerUnavailable."""
    return await _object(http, HostRequest(host, "GET", path), timeout)


async def post(
    http: Connections,
    host: Host,
    path: str,
    body: Contract,
    *,
    timeout: float,
    sent: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """POST a body that is answered with a JSON object; see `get`. sent: for one that may end the host, called once it
    was sent; it is not sent once more if its connection breaks."""
    return await _object(http, HostRequest(host, "POST", path, body.to_bytes()), timeout, sent)


async def closing_event(http: Connections, call: EventCall, kind: type[T]) -> T:
    """POST and wait for the event of this type, which ends the answer."""
    async with events(http, call) as stream:
        async for event in stream:
            if isinstance(event, kind):
                return event
    raise AssertionError("a stream ends with its closing event or raises")


@asynccontextmanager
async def events(http: Connections, call: EventCall) -> AsyncIterator[AsyncGenerator[Event, None]]:
    """POST and read the answer as server-sent events. Leaving the block ends the request on the server."""
    host, timeouts = call.host, call.timeouts
    request = HostRequest(host, "POST", call.path, msgspec.json.encode(call.body), call.request_id)
    with _failures(host):
        exchange = await http.send(request, timeouts.connect)
    try:
        call.written = exchange.written
        with _failures(host):
            head = await http.head(exchange, timeouts.silence, timeouts.connect, again=False)
            if head.status_code != HTTPStatus.OK:
                _raise_for(head, await exchange.content(MAX_EVENT_BYTES, timeouts.silence), host)
        async with aclosing(_events(exchange, call)) as stream:
            yield stream
    finally:
        http.release(exchange)


async def _events(exchange: SentRequest, call: EventCall) -> AsyncGenerator[Event, None]:
    """The events, with what they raise as a DisaggError; notes the last one."""

    async def read() -> bytes:
        part = await exchange.connection.read(call.timeouts.silence)
        call.last_sign = time.monotonic()
        return part

    def reported(phase: str) -> None:
        call.phase = phase
        if call.reported is not None:
            call.reported(phase)

    progress = ProgressJudge(call.host, call.timeouts, call.written, call.patience)
    with _failures(call.host):
        async with aclosing(parse(read, progress, reported)) as stream:
            async for event in stream:
                exchange.answered = isinstance(event, LAST_EVENTS)
                yield event


async def _object(
    http: Connections, request: HostRequest, timeout: float, sent: Callable[[], object] | None = None
) -> dict[str, Any]:
    host = request.host
    with _failures(host):
        exchange = await http.send(request, timeout)
        try:
            if sent is not None:
                sent()
            head = await http.head(exchange, timeout, timeout, again=sent is None)
            content = await exchange.content(MAX_EVENT_BYTES, timeout)
        finally:
            http.release(exchange)
        _raise_for(head, content, host)
        body = json.loads(content)
        if not isinstance(body, dict):
            raise _unreadable(host)
        return body


def _raise_for(head: h11.Response, content: bytes, host: Host) -> None:
    if head.status_code == HTTPStatus.OK:
        return
    try:
        described = ErrorAnswer.from_bytes(content).error
    except InvalidValue:
        raise ServerUnavailable(
            f"{host.name} ({host.url}) answered HTTP {head.status_code}, not as a disagg server does",
            "check the port in hosts.toml",
        ) from None
    error = DisaggError.from_json(described.to_json())
    after = dict(head.headers).get(b"retry-after", b"").decode("ascii", "replace")
    if isinstance(error, Overloaded) and after.isdecimal():
        error.retry_after_s = min(max(int(after[:9]), 1), MAX_RETRY_AFTER_S)
    raise error


@contextmanager
def _failures(host: Host) -> Iterator[None]:
    """Raise what HTTP and JSON raise as a DisaggError that names the host."""
    try:
        yield
    except TimeoutError as error:
        raise silent(host) from error
    except (OSError, h11.RemoteProtocolError) as error:
        reason = f": {error}" if str(error) else ""
        raise ServerUnavailable(f"lost the connection to {host.name}{reason}", "run `disagg status`") from error
    except msgspec.ValidationError as error:
        message = f"{host.name} ({host.url}) sent an event that this version of disagg cannot read: {error}"
        raise ServerUnavailable(message, "deploy the same version of disagg everywhere") from error
    except (ValueError, RecursionError, msgspec.DecodeError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise _unreadable(host) from error


def silent(host: Host) -> ServerSilent:
    """The error of a host that has a request and sends nothing."""
    return ServerSilent(f"{host.name} ({host.url}) did not answer in time", "run `disagg status`")


def _unreadable(host: Host) -> ServerUnavailable:
    return ServerUnavailable(f"{host.name} ({host.url}) sent an unreadable answer", "check the port in hosts.toml")
