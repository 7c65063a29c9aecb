"""Requests to hosts: JSON answers, event streams, answers of OpenAI's API. A failure is a DisaggError with the host."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from httptools import HttpParserError

from disagg.api.base import Contract, InvalidValue
from disagg.api.event_stream import EventReader
from disagg.api.events import (
    ERROR,
    EVENTS,
    DoneEvent,
    ErrorAnswer,
    ErrorEvent,
    Event,
    ProgressEvent,
    ScoredEvent,
    ShippedEvent,
)
from disagg.config import Host
from disagg.config.key import key_of
from disagg.errors import (
    MAX_RETRY_AFTER_S,
    DisaggError,
    Overloaded,
    ProtocolError,
    ServerSilent,
    ServerUnavailable,
)
from disagg.inference.http.connection import ResponseHead
from disagg.inference.http.connections import Connections, HostRequest, SentRequest
from disagg.inference.policy import DEFAULT_POLICY, STAYS, ProgressJudge, QueueExit, Timeouts
from disagg.whole.answers import MAX_REPLY_BYTES, models
from disagg.whole.refusals import Reply, error_of, not_openai, unknown_model
from disagg.whole.request import MODELS, OpenAIRequest

MAX_EVENT_BYTES: Final = 4 << 20
LAST_EVENTS: Final = (DoneEvent, ShippedEvent, ScoredEvent)
END: Final = b"[DONE]"

T = TypeVar("T", bound=Event)
R = TypeVar("R")
_DECODERS: Final = {name: msgspec.json.Decoder(kind) for name, kind in EVENTS.items()}
_ERRORS: Final = msgspec.json.Decoder(ErrorEvent)


@dataclass(slots=True)
class EventCall:
    """A POST to one host that is answered with events. Times by time.monotonic(), 0 until they are known: `written`, it
    was about to be written to an open connection; `last_sign`, the host sent the last piece of its answer. phase: the
    last one that the host has stated. reported: is called with each; what it raises ends the call. queue_exit:
    when the request leaves the host's queue."""

    host: Host
    path: str
    body: msgspec.Struct
    request_id: str
    timeouts: Timeouts = DEFAULT_POLICY.timeouts
    written: float = 0.0
    last_sign: float = 0.0
    phase: str = ""
    reported: Callable[[str], None] | None = None
    queue_exit: QueueExit = STAYS


@dataclass(slots=True)
class WholeCall:
    """A request to one whole-request host. via: its Via header, empty if it has none. written: time.monotonic() when it
    was about to be written to an open connection, 0 until then."""

    host: Host
    request: OpenAIRequest
    timeouts: Timeouts
    via: str = ""
    written: float = 0.0


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
    most: int = MAX_EVENT_BYTES,
) -> dict[str, Any]:
    """POST a body that is answered with a JSON object of at most so many bytes; see `get`. sent: for one that may end
    the host, called once it was sent; it is not sent once more if its connection breaks."""
    return await _object(http, HostRequest(host, "POST", path, body.to_bytes()), timeout, sent, most)


async def closing_event(http: Connections, call: EventCall, kind: type[T]) -> T:
    """POST and wait for the event of this type, which ends the answer."""
    async with events(http, call) as stream:
        return await stream.to_end(lambda event: event if isinstance(event, kind) else None)


@asynccontextmanager
async def events(http: Connections, call: EventCall) -> AsyncIterator[EventStream]:
    """POST and read the answer as server-sent events. Leaving the block ends the request on the server."""
    host, timeouts = call.host, call.timeouts
    request = HostRequest(host, "POST", call.path, msgspec.json.encode(call.body), call.request_id)
    with failures(host):
        exchange = await http.send(request, timeouts.connect)
    try:
        call.written = exchange.written
        with failures(host):
            head = await http.head(exchange, timeouts.silence, timeouts.connect, again=False)
            if head.status != HTTPStatus.OK:
                raise_for(head, await exchange.content(MAX_EVENT_BYTES, timeouts.silence), host)
        yield EventStream(exchange, call)
    finally:
        http.release(exchange)


class EventStream:
    """The events of one answer but `progress`, which its ProgressJudge gets. Those of unknown names are skipped.

    Both ways to read raise what an `error` event states, TimeoutError's error if nothing else comes within the time
    that a host may be silent, and ServerUnavailable if the answer is cut off.
    """

    def __init__(self, exchange: SentRequest, call: EventCall) -> None:
        self._exchange, self._call = exchange, call
        self._reader = EventReader()
        self._judge = ProgressJudge(call.host, call.timeouts, call.written, call.queue_exit)
        self._arrived: deque[Event] = deque()
        self._error: Exception | None = None  # that came with them, and follows them

    async def next(self) -> Event:
        """The next event."""
        if not self._arrived:
            await self._follow(self._arrived.append)
        return self._arrived.popleft()

    async def to_end(self, take: Callable[[Event], R | None]) -> R:
        """Pass on each event as soon as it has been read from the socket, until `take` returns something, which is
        returned. What it raises ends the answer."""
        result: R | None = None

        def receive(event: Event) -> bool:
            nonlocal result
            result = take(event)
            return result is not None

        while self._arrived:
            if receive(self._arrived.popleft()):
                break
        else:
            await self._follow(receive)
        assert result is not None, "`_follow` raises if a stream ends without its closing event"
        return result

    async def _follow(self, receive: Callable[[Event], bool | None]) -> None:
        """Give `receive` what is read until it returns True, or some of it is in `_arrived`."""

        def take(piece: bytes) -> bool:
            try:
                return self._read(piece, receive)
            except Exception as error:
                if not self._arrived:
                    raise
                self._error = error
                return True

        host = self._call.host
        with failures(host):
            if self._error is not None:
                raise self._error
            if not await self._exchange.connection.follow(take, time.monotonic() + self._call.timeouts.silence):
                raise ServerUnavailable(f"{host.name} closed the stream before the answer was complete", "see its log")

    def _read(self, piece: bytes, receive: Callable[[Event], bool | None]) -> bool:
        call, now = self._call, time.monotonic()
        call.last_sign = now
        for name, data in self._reader.feed(piece):
            if name == ERROR:
                raise DisaggError.from_json(_ERRORS.decode(data).to_json())
            if (decoder := _DECODERS.get(name)) is None:
                continue
            event = decoder.decode(data)
            self._exchange.connection.extend(now + call.timeouts.silence)
            if isinstance(event, ProgressEvent):
                self._progress(event, now)
                continue
            self._judge.begun()
            self._exchange.answered = isinstance(event, LAST_EVENTS)
            if receive(event):
                return True
        if self._reader.unread > MAX_EVENT_BYTES:
            raise ProtocolError(f"{call.host.name} sent an event of over {MAX_EVENT_BYTES} bytes")
        return bool(self._arrived)

    def _progress(self, event: ProgressEvent, now: float) -> None:
        self._call.phase = event.phase
        if self._call.reported is not None:
            self._call.reported(event.phase)
        if problem := self._judge.problem(event, now):
            raise problem


async def get_whole(http: Connections, host: Host, path: str, timeout_s: float) -> Reply:
    """A whole-request host's answer to a GET. path: below its URL. `timeout_s` bounds connecting, and every wait."""
    with failures(host):
        request = HostRequest(host, "GET", _target(host, path), key=key_of(host.engine, host.name))
        exchange = await http.send(request, timeout_s)
        try:
            head = await http.head(exchange, timeout_s, timeout_s)
            return await _reply(head, exchange, timeout_s)
        finally:
            http.release(exchange)


async def whole_answer(
    http: Connections, call: WholeCall, opened: Callable[[], None], take: Callable[[bytes], bool]
) -> None:
    """Ask a whole-request host. opened: is called when its answer begins, at its head. take: gets the data of each
    event, without the closing [DONE]; returns whether the answer has begun with it: servers may send an empty piece
    first.

    Raises the error of an answer that is not 200; a model that the host does not have is named with those it has.
    """
    host, timeouts = call.host, call.timeouts
    path, content = _target(host, call.request.path), call.request.to_bytes()
    request = HostRequest(host, "POST", path, content, key=key_of(host.engine, host.name), via=call.via)
    reader = EventReader()
    with failures(host):
        exchange = await http.send(request, timeouts.whole_connect)

    def read(piece: bytes) -> bool:
        for _, data in reader.feed(piece):
            if data == END:
                exchange.answered = True
                return True
            if take(data):
                exchange.connection.extend(time.monotonic() + timeouts.whole_silence)
        if reader.unread > MAX_REPLY_BYTES:
            raise ProtocolError(f"{host.name} sent a piece of over {MAX_REPLY_BYTES} bytes")
        return False

    try:
        call.written = exchange.written
        with failures(host):
            head = await http.head(exchange, timeouts.whole_first, timeouts.whole_connect)
            if head.status != HTTPStatus.OK:
                await _raise_whole(http, host, await _reply(head, exchange, timeouts.whole_silence), timeouts)
            if not (kind := head.headers.get("content-type", "")).startswith("text/event-stream"):
                raise not_openai(host, f"{kind[:64] or 'no content type'} instead of a stream")
            opened()
            await exchange.connection.follow(read, call.written + timeouts.whole_first)
    finally:
        http.release(exchange)


async def _raise_whole(http: Connections, host: Host, reply: Reply, timeouts: Timeouts) -> None:
    if reply.status == HTTPStatus.NOT_FOUND:
        listed = await get_whole(http, host, MODELS, timeouts.whole_connect)
        if listed.status == HTTPStatus.OK:
            try:
                names = models(listed.content)
            except InvalidValue as error:
                raise not_openai(host, str(error)) from None
            if unknown := unknown_model(host, names):
                raise unknown
    raise error_of(reply, host)


async def _reply(head: ResponseHead, exchange: SentRequest, silence_s: float) -> Reply:
    return Reply(head.status, head.headers, await exchange.content(MAX_REPLY_BYTES, silence_s))


def _target(host: Host, path: str) -> str:
    """The path of a request: that of the host's URL, and the path below it."""
    _, _, after = host.url.partition("://")
    base = after.partition("/")[2]
    return f"/{base}{path}" if base else path


async def _object(
    http: Connections,
    request: HostRequest,
    timeout: float,
    sent: Callable[[], object] | None = None,
    most: int = MAX_EVENT_BYTES,
) -> dict[str, Any]:
    host = request.host
    with failures(host):
        exchange = await http.send(request, timeout)
        try:
            if sent is not None:
                sent()
            head = await http.head(exchange, timeout, timeout, again=sent is None)
            content = await exchange.content(most, timeout)
        finally:
            http.release(exchange)
        raise_for(head, content, host)
        body = json.loads(content)
        if not isinstance(body, dict):
            raise _unreadable(host)
        return body


def raise_for(head: ResponseHead, content: bytes, host: Host) -> None:
    if head.status == HTTPStatus.OK:
        return
    try:
        described = ErrorAnswer.from_bytes(content).error
    except InvalidValue:
        raise ServerUnavailable(
            f"{host.name} ({host.url}) answered HTTP {head.status}, not as a disagg server does",
            "check the port in hosts.toml",
        ) from None
    error = DisaggError.from_json(described.to_json())
    after = head.headers.get("retry-after", "")
    if isinstance(error, Overloaded) and after.isascii() and after.isdecimal():
        error.retry_after_s = min(max(int(after[:9]), 1), MAX_RETRY_AFTER_S)
    raise error


@contextmanager
def failures(host: Host) -> Iterator[None]:
    """Raise what HTTP and JSON raise as a DisaggError that names the host."""
    try:
        yield
    except TimeoutError as error:
        raise silent(host) from error
    except (OSError, HttpParserError) as error:
        if host.whole and isinstance(error, HttpParserError):
            raise not_openai(host, str(error)) from error
        who = f"{host.name} ({host.url})" if host.whole else host.name
        reason = f": {error}" if str(error) else ""
        raise ServerUnavailable(f"lost the connection to {who}{reason}", _hint(host)) from error
    except msgspec.ValidationError as error:
        message = f"{host.name} ({host.url}) sent an event that this version of disagg cannot read: {error}"
        raise ServerUnavailable(message, "deploy the same version of disagg everywhere") from error
    except (ValueError, RecursionError, msgspec.DecodeError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise _unreadable(host) from error


def silent(host: Host) -> ServerSilent:
    """The error of a host that has a request and sends nothing."""
    return ServerSilent(f"{host.name} ({host.url}) did not answer in time", _hint(host))


def _hint(host: Host) -> str:
    return "see its log" if host.whole else "run `disagg status`"


def _unreadable(host: Host) -> ServerUnavailable:
    return ServerUnavailable(f"{host.name} ({host.url}) sent an unreadable answer", "check the port in hosts.toml")
