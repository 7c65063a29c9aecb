"""The servers' HTTP API from the caller's side: JSON calls and event streams, with every failure as a DisaggError."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import httpx

from disagg.config import Host
from disagg.errors import DisaggError, Overloaded, ProtocolError, ServerSilent, ServerUnavailable

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 30.0  # servers send a comment every 10 s in which they send nothing else
ORDER_SILENCE_S = 25.0  # of a prefill host, after which the request goes on without it
MAX_EVENT_BYTES = 4 << 20

Event = tuple[str, dict[str, Any]]


def client(token: str) -> httpx.AsyncClient:
    """An HTTP client for the fleet: no proxies, no redirects, bounded connects."""
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {token}"},
        timeout=httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30),
        trust_env=False,
    )


async def get(http: httpx.AsyncClient, host: Host, path: str, *, timeout: float) -> dict[str, Any]:
    """GET a JSON object. Raises the server's own error, or ServerUnavailable."""
    limits = httpx.Timeout(timeout, connect=CONNECT_TIMEOUT_S)
    with _failures(host):
        async with http.stream("GET", host.url + path, timeout=limits) as answer:
            content = await _bounded(answer, host)
            _raise_for(answer, content, host)
            return _object(json.loads(content), host)


async def closing_event(
    http: httpx.AsyncClient, host: Host, path: str, body: Mapping[str, Any], *, request_id: str
) -> dict[str, Any]:
    """POST JSON and wait for the one `done` event that the answer ends with."""
    async with events(http, host, path, body, request_id=request_id, silence_s=ORDER_SILENCE_S) as stream:
        async for name, data in stream:
            if name == "done":
                return data
    raise AssertionError("a stream ends with its closing event or raises")


@asynccontextmanager
async def events(
    http: httpx.AsyncClient,
    host: Host,
    path: str,
    body: Mapping[str, Any],
    *,
    request_id: str,
    silence_s: float = SILENCE_TIMEOUT_S,
) -> AsyncIterator[AsyncGenerator[Event, None]]:
    """POST JSON and read the answer as server-sent events. Leaving the block ends the request on the server."""
    with _failures(host):
        limits = httpx.Timeout(silence_s, connect=CONNECT_TIMEOUT_S)
        headers = {"X-Request-Id": request_id}
        async with http.stream("POST", host.url + path, json=body, headers=headers, timeout=limits) as answer:
            if answer.status_code != httpx.codes.OK:
                _raise_for(answer, await _bounded(answer, host), host)
            async with aclosing(_parse(answer, host)) as stream:
                yield stream


async def _parse(answer: httpx.Response, host: Host) -> AsyncGenerator[Event, None]:
    name, buffer = "", bytearray()
    async for part in answer.aiter_raw():
        buffer += part
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if line.startswith(b"event: "):
                name = line[7:].decode()
            elif line.startswith(b"data: "):
                data = _object(json.loads(line[6:]), host)
                if name == "error":
                    raise DisaggError.from_json(data)
                yield name, data
        if len(buffer) > MAX_EVENT_BYTES:
            raise ProtocolError(f"{host.name} sent an event of over {MAX_EVENT_BYTES} bytes")
    raise ServerUnavailable(f"{host.name} closed the stream before the answer was complete", "see its log")


async def _bounded(answer: httpx.Response, host: Host) -> bytes:
    content = bytearray()
    async for part in answer.aiter_raw():
        content += part
        if len(content) > MAX_EVENT_BYTES:
            raise ProtocolError(f"{host.name} sent an answer of over {MAX_EVENT_BYTES} bytes")
    return bytes(content)


def _object(value: Any, host: Host) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ServerUnavailable(f"{host.name} ({host.url}) sent an unreadable answer", "check the port in hosts.toml")
    return value


def _raise_for(answer: httpx.Response, content: bytes, host: Host) -> None:
    if answer.status_code == httpx.codes.OK:
        return
    try:
        described = json.loads(content)["error"]
        known = isinstance(described, dict) and {"code", "message", "hint"} <= described.keys()
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ServerUnavailable(
            f"{host.name} ({host.url}) answered HTTP {answer.status_code}, not as a disagg server does",
            "check the port in hosts.toml",
        )
    error = DisaggError.from_json(described)
    after = answer.headers.get("retry-after", "")
    if isinstance(error, Overloaded) and after.isdecimal():
        error.retry_after_s = int(after)
    raise error


@contextmanager
def _failures(host: Host) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise ServerUnavailable(f"no server answers at {host.url} ({host.name})", "run `disagg status`") from error
    except httpx.TimeoutException as error:
        raise ServerSilent(f"{host.name} ({host.url}) did not answer in time", "run `disagg status`") from error
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise ServerUnavailable(f"lost the connection to {host.name}: {error}", "run `disagg status`") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ServerUnavailable(f"{host.name} ({host.url}) sent an unreadable answer", "see its log") from error
