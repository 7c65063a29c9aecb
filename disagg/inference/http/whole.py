"""Requests to whole-request hosts. Every failure is a DisaggError that names the host."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import h11

from disagg.api.base import InvalidValue
from disagg.config import Host
from disagg.config.key import key_of
from disagg.errors import ProtocolError, ServerSilent, ServerUnavailable
from disagg.inference.http.connections import Connections, HostRequest, SentRequest
from disagg.inference.policy import Timeouts
from disagg.whole.answers import MAX_REPLY_BYTES, models
from disagg.whole.refusals import Reply, error_of, not_openai, unknown_model
from disagg.whole.request import MODELS, OpenAIRequest

END: Final = b"[DONE]"


@dataclass(slots=True)
class WholeCall:
    """A request to one whole-request host. via: its Via header, empty if it has none. written: time.monotonic() when it
    was about to be written to an open connection, 0 until then. begun: set by the reader of the pieces once the answer
    has begun: servers may send an empty piece first."""

    host: Host
    request: OpenAIRequest
    timeouts: Timeouts
    via: str = ""
    written: float = 0.0
    begun: bool = False


async def get(http: Connections, host: Host, path: str, timeout_s: float) -> Reply:
    """The answer to a GET. path: below the host's URL. `timeout_s` bounds connecting, and every wait."""
    with _failures(host):
        exchange = await http.send(
            HostRequest(host, "GET", _target(host, path), key=key_of(host.engine, host.name)), timeout_s
        )
        try:
            head = await http.head(exchange, timeout_s, timeout_s)
            return await _reply(head, exchange, timeout_s)
        finally:
            http.release(exchange)


@asynccontextmanager
async def pieces(http: Connections, call: WholeCall) -> AsyncIterator[AsyncGenerator[bytes, None]]:
    """The data of each event of a streamed answer, without the closing [DONE]. Leaving the block ends the request.

    Raises the error of an answer that is not 200; a model that the host does not have is named with those it has.
    """
    host, timeouts = call.host, call.timeouts
    path, content = _target(host, call.request.path), call.request.to_bytes()
    request = HostRequest(host, "POST", path, content, key=key_of(host.engine, host.name), via=call.via)
    with _failures(host):
        exchange = await http.send(request, timeouts.whole_connect)
    try:
        call.written = exchange.written
        with _failures(host):
            head = await http.head(exchange, timeouts.whole_first, timeouts.whole_connect)
            if head.status_code != HTTPStatus.OK:
                await _raise(http, host, await _reply(head, exchange, timeouts.whole_silence), timeouts)
            if not (kind := _headers(head).get("content-type", "")).startswith("text/event-stream"):
                raise not_openai(host, f"{kind[:64] or 'no content type'} instead of a stream")
        async with aclosing(_events(exchange, call)) as events:
            yield events
    finally:
        http.release(exchange)


async def _events(exchange: SentRequest, call: WholeCall) -> AsyncGenerator[bytes, None]:
    buffer, timeouts = bytearray(), call.timeouts
    latest = call.written + timeouts.whole_first
    with _failures(call.host):
        while part := await exchange.connection.read(max(0.001, latest - time.monotonic())):
            buffer += part
            for data in _lines(buffer):
                if data == END:
                    exchange.answered = True
                    return
                yield data
                if call.begun:
                    latest = time.monotonic() + timeouts.whole_silence
            if len(buffer) > MAX_REPLY_BYTES:
                raise ProtocolError(f"{call.host.name} sent a piece of over {MAX_REPLY_BYTES} bytes")


def _lines(buffer: bytearray) -> Iterator[bytes]:
    """The data of the whole lines, which are removed from the buffer. Comments and names of events are skipped."""
    while (end := buffer.find(b"\n")) >= 0:
        line = bytes(buffer[:end]).rstrip(b"\r")
        del buffer[: end + 1]
        if line.startswith(b"data:"):
            yield line[5:].strip()


async def _raise(http: Connections, host: Host, reply: Reply, timeouts: Timeouts) -> None:
    if reply.status == HTTPStatus.NOT_FOUND:
        listed = await get(http, host, MODELS, timeouts.whole_connect)
        if listed.status == HTTPStatus.OK:
            try:
                names = models(listed.content)
            except InvalidValue as error:
                raise not_openai(host, str(error)) from None
            if unknown := unknown_model(host, names):
                raise unknown
    raise error_of(reply, host)


async def _reply(head: h11.Response, exchange: SentRequest, silence_s: float) -> Reply:
    return Reply(head.status_code, _headers(head), await exchange.content(MAX_REPLY_BYTES, silence_s))


def _headers(head: h11.Response) -> dict[str, str]:
    return {name.decode("ascii", "replace"): value.decode("ascii", "replace") for name, value in head.headers}


def _target(host: Host, path: str) -> str:
    """The path of a request: that of the host's URL, and the path below it."""
    _, _, after = host.url.partition("://")
    base = after.partition("/")[2]
    return f"/{base}{path}" if base else path


@contextmanager
def _failures(host: Host) -> Iterator[None]:
    """Raise what HTTP raises as a DisaggError that names the host."""
    try:
        yield
    except TimeoutError as error:
        raise ServerSilent(f"{host.name} ({host.url}) did not answer in time", "see its log") from error
    except h11.RemoteProtocolError as error:
        raise not_openai(host, str(error)) from error
    except OSError as error:
        reason = f": {error}" if str(error) else ""
        raise ServerUnavailable(f"lost the connection to {host.name} ({host.url}){reason}", "see its log") from error
