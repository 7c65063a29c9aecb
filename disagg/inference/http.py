"""The servers' HTTP API from the caller's side: JSON calls and event streams. Every failure is a DisaggError."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx
import msgspec

from disagg.api.base import Contract, InvalidValue
from disagg.api.events import ERROR, EVENTS, ErrorAnswer, ErrorEvent, Event, ProgressEvent
from disagg.config import Host
from disagg.errors import (
    DisaggError,
    Overloaded,
    ProtocolError,
    RequestError,
    ServerNotRunning,
    ServerSilent,
    ServerUnavailable,
)
from disagg.inference.policy import DEFAULT_POLICY, Timeouts

MAX_EVENT_BYTES = 4 << 20
COMPUTING: Final = ("computing the prompt", "generating")
"""The phases in which a request's host must make progress."""

T = TypeVar("T", bound=Event)
_DECODERS = {name: msgspec.json.Decoder(kind) for name, kind in EVENTS.items()}
_ERRORS = msgspec.json.Decoder(ErrorEvent)


@dataclass(slots=True)
class Beats:
    """Whether a host's engine gets on. beats: as its last progress event stated them. since: when they had changed."""

    beats: int = -1
    since: float = 0.0

    def stalled_for(self, event: ProgressEvent, now: float) -> float:
        """Seconds for which the engine has finished nothing, although it should."""
        if event.beats != self.beats or event.phase not in COMPUTING:
            self.beats, self.since = event.beats, now
        return now - self.since


@dataclass(slots=True)
class Call:
    """A POST to one host. Times by time.monotonic(), 0 until they are known: `written`, its body was about to be
    written to an open connection; `last_sign`, the host sent the last piece of its answer. reported: is called with the
    phase that each of the host's progress events states."""

    host: Host
    path: str
    body: msgspec.Struct
    request_id: str
    timeouts: Timeouts = DEFAULT_POLICY.timeouts
    written: float = 0.0
    last_sign: float = 0.0
    reported: Callable[[str], None] | None = None

    async def trace(self, name: str, _: Any) -> None:
        """httpcore's trace extension."""
        if name == "http11.send_request_body.started":
            self.written = time.monotonic()


def client(token: str) -> httpx.AsyncClient:
    """An HTTP client for the fleet: no proxies, no redirects, bounded connects.

    Hosts are reached by http:// only, so that no certificates are loaded (20 ms).
    """
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {token}"},
        timeout=httpx.Timeout(DEFAULT_POLICY.timeouts.silence, connect=DEFAULT_POLICY.timeouts.connect),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30),
        trust_env=False,
        verify=False,
    )


def require_open(http: httpx.AsyncClient) -> None:
    """Raise RequestError if the client has been closed."""
    if http.is_closed:
        raise RequestError("this client is closed", "make a new one, or send requests inside its `with` block")


async def get(http: httpx.AsyncClient, host: Host, path: str, *, timeout: float) -> dict[str, Any]:
    """GET a JSON object. Raises the server's own error, or ServerUnavailable."""
    return await _exchange(http, host, http.build_request("GET", host.url + path, timeout=timeout))


async def post(http: httpx.AsyncClient, host: Host, path: str, body: Contract, *, timeout: float) -> dict[str, Any]:
    """POST a body that is answered with a JSON object. Raises the server's own error, or ServerUnavailable."""
    headers = {"Content-Type": "application/json"}
    request = http.build_request("POST", host.url + path, content=body.to_bytes(), headers=headers, timeout=timeout)
    return await _exchange(http, host, request)


async def _exchange(http: httpx.AsyncClient, host: Host, request: httpx.Request) -> dict[str, Any]:
    with _failures(host):
        response = await http.send(request, stream=True)
        async with aclosing(response):
            answer = await _bounded(response, host)
            _raise_for(response, answer, host)
            return _object(answer, host)


async def closing_event(http: httpx.AsyncClient, call: Call, kind: type[T]) -> T:
    """POST and wait for the event of this type, which ends the answer."""
    async with events(http, call) as stream:
        async for event in stream:
            if isinstance(event, kind):
                return event
    raise AssertionError("a stream ends with its closing event or raises")


@asynccontextmanager
async def events(http: httpx.AsyncClient, call: Call) -> AsyncIterator[AsyncGenerator[Event, None]]:
    """POST and read the answer as server-sent events. Leaving the block ends the request on the server."""
    require_open(http)
    with _failures(call.host):
        async with http.stream(
            "POST",
            call.host.url + call.path,
            content=msgspec.json.encode(call.body),
            headers={"X-Request-Id": call.request_id, "Content-Type": "application/json"},
            timeout=httpx.Timeout(call.timeouts.silence, connect=call.timeouts.connect),
            extensions={"trace": call.trace},
        ) as response:
            if response.status_code != httpx.codes.OK:
                _raise_for(response, await _bounded(response, call.host), call.host)
            async with aclosing(_parse(response, call)) as stream:
                yield stream


async def _parse(response: httpx.Response, call: Call) -> AsyncGenerator[Event, None]:
    """The events of a response but `progress`. Events of unknown names are skipped; an `error` event is raised.

    Raises ServerSilent if the host computes and its engine finishes nothing.
    """
    host, beats, name, buffer = call.host, Beats(), "", bytearray()
    async for part in _parts(response, host):
        buffer += part
        call.last_sign = time.monotonic()
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if line.startswith(b"event: "):
                name = line[7:].decode()
            elif line.startswith(b"data: "):
                if name == ERROR:
                    raise DisaggError.from_json(_ERRORS.decode(line[6:]).to_json())
                if name in _DECODERS:
                    event = _DECODERS[name].decode(line[6:])
                    if not isinstance(event, ProgressEvent):
                        yield event
                        continue
                    if call.reported is not None:
                        call.reported(event.phase)
                    if (seconds := beats.stalled_for(event, time.monotonic())) >= call.timeouts.stall:
                        raise _stalled(host, event.phase, seconds)
        if len(buffer) > MAX_EVENT_BYTES:
            raise ProtocolError(f"{host.name} sent an event of over {MAX_EVENT_BYTES} bytes")
    raise ServerUnavailable(f"{host.name} closed the stream before the answer was complete", "see its log")


async def _parts(response: httpx.Response, host: Host) -> AsyncGenerator[bytes, None]:
    with _failures(host):
        async for part in response.aiter_raw():
            yield part


def _object(content: bytes, host: Host) -> dict[str, Any]:
    body = json.loads(content)
    if not isinstance(body, dict):
        raise _unreadable(host)
    return body


async def _bounded(response: httpx.Response, host: Host) -> bytes:
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > MAX_EVENT_BYTES:
            raise ProtocolError(f"{host.name} sent an answer of over {MAX_EVENT_BYTES} bytes")
    return bytes(content)


def _raise_for(response: httpx.Response, content: bytes, host: Host) -> None:
    if response.status_code == httpx.codes.OK:
        return
    try:
        described = ErrorAnswer.from_bytes(content).error
    except InvalidValue:
        raise ServerUnavailable(
            f"{host.name} ({host.url}) answered HTTP {response.status_code}, not as a disagg server does",
            "check the port in hosts.toml",
        ) from None
    error = DisaggError.from_json(described.to_json())
    after = response.headers.get("retry-after", "")
    if isinstance(error, Overloaded) and after.isdecimal():
        error.retry_after_s = int(after)
    raise error


@contextmanager
def _failures(host: Host) -> Iterator[None]:
    """Raise what HTTP and JSON raise as a DisaggError that names the host."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        kind = ServerNotRunning if _is_refusal(error) else ServerUnavailable
        raise kind(
            f"no server answers at {host.url} ({host.name})",
            "run `disagg status`; `disagg start` starts what is stopped",
        ) from error
    except httpx.TimeoutException as error:
        raise silent(host) from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        reason = f": {error}" if str(error) else ""
        raise ServerUnavailable(f"lost the connection to {host.name}{reason}", "run `disagg status`") from error
    except msgspec.ValidationError as error:
        message = f"{host.name} ({host.url}) sent an event that this version of disagg cannot read: {error}"
        raise ServerUnavailable(message, "deploy the same version of disagg everywhere") from error
    except (ValueError, RecursionError, msgspec.DecodeError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise _unreadable(host) from error


def _is_refusal(error: BaseException | None) -> bool:
    """Whether every address of the host refused the connection. httpx, httpcore and anyio wrap the system's errors."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_refusal, error.exceptions))
    return isinstance(error, ConnectionRefusedError) or (
        error is not None and _is_refusal(error.__cause__ or error.__context__)
    )


def silent(host: Host) -> ServerSilent:
    """The error of a host that has a request and sends nothing."""
    return ServerSilent(f"{host.name} ({host.url}) did not answer in time", "run `disagg status`")


def _stalled(host: Host, phase: str, seconds: float) -> ServerSilent:
    return ServerSilent(
        f"{host.name} ({host.url}) is stuck: {phase}, and its engine has made no progress for {seconds:.0f} s",
        f"run `disagg restart --host {host.name}`",
    )


def _unreadable(host: Host) -> ServerUnavailable:
    return ServerUnavailable(f"{host.name} ({host.url}) sent an unreadable answer", "check the port in hosts.toml")
