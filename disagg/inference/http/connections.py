"""The connections of a client: how one is opened to a host that proves itself, and those that are kept."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from httptools import HttpParserError

from disagg.config import Host
from disagg.errors import (
    ProtocolError,
    RequestError,
    ServerNotRunning,
    ServerRefused,
    ServerSilent,
    ServerUnavailable,
)
from disagg.inference.http.connection import READ_BYTES, HostConnection, ResponseHead
from disagg.tls.certificate import unproven
from disagg.token import Tokens

Address = tuple[str, int]

IDLE_S = 30.0
MAX_IDLE = 64  # connections to one host
ENDING_S = 1.0  # for a response to end after its last event


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A request to a host. id: names it to its lease and in logs; empty if it has none. key: what a whole-request host
    wants to be shown, empty if nothing; it never gets the fleet's token. via: its Via header, empty if it has none."""

    host: Host
    method: Literal["GET", "POST"]
    path: str
    body: bytes = b""
    id: str = ""
    key: str = field(default="", repr=False)
    via: str = ""


@dataclass(slots=True)
class SentRequest:
    """A request that has been sent, and its response. written: time.monotonic() when it was. reused: its connection had
    served another request.

    answered: all that matters of the response has been read: its connection is kept once it has ended.
    """

    request: HostRequest
    connection: HostConnection
    written: float
    reused: bool
    answered: bool = False

    async def content(self, limit: int, silence_s: float) -> bytes:
        """The whole body of the response. Raises ProtocolError if it is over `limit` bytes, and TimeoutError."""
        content = bytearray()

        def take(piece: bytes) -> bool:
            nonlocal content
            content += piece
            if len(content) > limit:
                raise ProtocolError(f"{self.request.host.name} sent an answer of over {limit} bytes")
            self.connection.extend(time.monotonic() + silence_s)
            return False

        await self.connection.follow(take, time.monotonic() + silence_s)
        return bytes(content)


class Connections:
    """The connections of one client to its hosts, kept open between requests. Belongs to one event loop. closed: set
    when the client is closed.

    Not aiohttp's: with it a small request takes 124 us instead of 62, and its import 130 ms; it does not tell a caller
    whether a broken request had been sent, on which `again` rests.
    """

    @property
    def token(self) -> str:
        """The fleet's token that hosts get."""
        return self._tokens.current

    def __init__(self, tokens: Tokens) -> None:
        self.closed = asyncio.Event()
        self._tokens = tokens
        self._idle: dict[Address, deque[tuple[float, HostConnection]]] = {}
        self._busy: set[HostConnection] = set()
        self._opener = Opener()
        self._opening: set[asyncio.Future[HostConnection]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def require_open(self) -> None:
        """Raise RequestError if the client has been closed."""
        if self.closed.is_set():
            raise RequestError("this client is closed", "make a new one, or send requests inside its `with` block")

    async def send(self, request: HostRequest, connect_s: float) -> SentRequest:
        """Send a request. Raises ServerUnavailable if no connection is open and none can be opened."""
        self.require_open()
        idle = self._take(request.host)
        connection = idle or await self._open(request.host, connect_s)
        return self._send(request, connection, reused=idle is not None)

    async def head(
        self, exchange: SentRequest, silence_s: float, connect_s: float, *, again: bool = True
    ) -> ResponseHead:
        """Status and headers of the response. A kept connection that the host has closed meanwhile is replaced. again:
        False for a request that may have ended the host: it is not sent once more."""
        try:
            return await exchange.connection.head(silence_s)
        except TimeoutError:
            raise
        except (OSError, HttpParserError):
            if not (exchange.reused and again) or self.closed.is_set():
                raise
        self._drop(exchange.connection)
        sent = self._send(exchange.request, await self._open(exchange.request.host, connect_s), reused=False)
        exchange.connection, exchange.reused = sent.connection, False
        return await exchange.connection.head(silence_s)

    def release(self, exchange: SentRequest) -> None:
        """The exchange is over. Its connection is kept if the response has ended, or will at once; else closed, which
        ends the request on the server."""
        connection, address = exchange.connection, _address(exchange.request.host)
        if self._keep(address, connection):
            return
        if not exchange.answered:
            self._drop(connection)
            return

        def ended() -> None:
            timer.cancel()
            if not self._keep(address, connection):
                self._drop(connection)

        timer = asyncio.get_running_loop().call_later(ENDING_S, self._drop, connection)
        connection.leave(ended)

    async def aclose(self) -> None:
        """Close all connections."""
        self.closed.set()
        idle = [connection for kept in self._idle.values() for _, connection in kept]
        self._idle.clear()
        for connection in (*idle, *self._busy):
            connection.close()
        self._busy.clear()
        for opening in self._opening:
            opening.cancel()
        await asyncio.sleep(0)  # their sockets are closed by then

    def _send(self, request: HostRequest, connection: HostConnection, *, reused: bool) -> SentRequest:
        host = request.host
        headers = [("Host", urlsplit(host.url).netloc)]
        if key := request.key if host.whole else connection.token:  # not a newer one, which it has not proven
            headers.append(("Authorization", f"Bearer {key}"))
        if request.body:
            headers.append(("Content-Type", "application/json"))
        if request.id:
            headers.append(("X-Request-Id", request.id))
        if request.via:
            headers.append(("Via", request.via))
        self._busy.add(connection)
        written = time.monotonic()
        try:
            connection.send(request.method, request.path, headers, request.body)
        except BaseException:  # also a cancellation: a part of the request may have been sent
            self._drop(connection)
            raise
        return SentRequest(request, connection, written, reused)

    async def _open(self, host: Host, seconds: float) -> HostConnection:
        """A new connection. Raises RequestError if the client is closed meanwhile."""
        opener = self._opener
        opening = asyncio.ensure_future(
            opener.whole(host, seconds) if host.whole else opener.ours(host, seconds, self._tokens.current)
        )
        self._opening.add(opening)
        try:
            connection = await opening
        except asyncio.CancelledError:
            opening.add_done_callback(_close)
            if not _is_cancelled():  # `aclose` has cancelled the opening, and nobody this request
                self.require_open()
            raise
        finally:
            self._opening.discard(opening)
        if self.closed.is_set():
            connection.close()
        self.require_open()
        return connection

    def _take(self, host: Host) -> HostConnection | None:
        """An open connection, the one that was used last."""
        kept = self._idle.get(_address(host), ())
        token = "" if host.whole else self._tokens.current
        while kept:
            since, connection = kept.pop()
            if connection.usable and connection.token == token and time.monotonic() - since < IDLE_S:
                return connection
            connection.close()
        return None

    def _keep(self, address: Address, connection: HostConnection) -> bool:
        """Keep a connection for the next request, if it can be."""
        if self.closed.is_set() or not connection.reset():
            return False
        self._busy.discard(connection)
        kept = self._idle.setdefault(address, deque())
        kept.append((time.monotonic(), connection))
        if len(kept) > MAX_IDLE or time.monotonic() - kept[0][0] > IDLE_S:
            kept.popleft()[1].close()
        return True

    def _drop(self, connection: HostConnection) -> None:
        self._busy.discard(connection)
        connection.close()


def _address(host: Host) -> Address:
    return host.address, host.port


def _close(opened: asyncio.Future[HostConnection]) -> None:
    """Close a connection that nobody waits for any more."""
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()


def _is_cancelled() -> bool:
    """Whether somebody has cancelled the task that this is called in."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Opener:
    """Opens connections, on one event loop. asyncio connects; only its lookup of names is not used: it runs in a pool,
    whose threads a program waits for at its end."""

    def __init__(self) -> None:
        self._lookups: dict[Address, asyncio.Future[list[Address]]] = {}
        self._buffer = memoryview(bytearray(READ_BYTES))

    async def ours(self, host: Host, seconds: float, token: str) -> HostConnection:
        """A connection to a server that has proven that it has the fleet's token, which nothing is sent to before."""
        connection = await self._open(host, seconds, lambda: HostConnection(self._buffer, token), {})
        try:
            await connection.secured(seconds)
        except ssl.SSLError as error:
            raise unproven(error, f"{host.name} ({host.url})") from error
        except TimeoutError as error:
            connection.close()
            raise ServerSilent(f"{host.name} ({host.url}) did not answer in time", "run `disagg status`") from error
        except OSError as error:
            raise ServerUnavailable(f"{host.name} ({host.url}): {error}", "run `disagg status`") from error
        except BaseException:  # also a cancellation: nobody else has the connection yet
            connection.close()
            raise
        return connection

    async def whole(self, host: Host, seconds: float) -> HostConnection:
        tls = {"ssl": _tls_context(), "server_hostname": host.address} if urlsplit(host.url).scheme == "https" else {}
        return await self._open(host, seconds, lambda: HostConnection(self._buffer), tls)

    async def _open(
        self, host: Host, seconds: float, make: Callable[[], HostConnection], tls: Mapping[str, Any]
    ) -> HostConnection:
        """Connect to the first address of the host that accepts, in so many seconds for each."""
        loop, errors = asyncio.get_running_loop(), list[Exception]()
        try:
            async with asyncio.timeout(seconds):
                found = await self._addresses(host)
            for address in found:
                try:
                    async with asyncio.timeout(seconds):
                        _, connection = await loop.create_connection(make, *address, **tls)
                    return connection
                except OSError as error:  # TimeoutError is one
                    errors.append(error)
        except OSError as error:  # the name is unknown
            errors.append(error)
        raise _unreachable(host, errors) from errors[-1]

    async def _addresses(self, host: Host) -> list[Address]:
        """The addresses of a host: one, unless hosts.toml has a name for it."""
        address = host.address, host.port
        with suppress(ValueError):
            ip_address(host.address)
            return [address]
        if (lookup := self._lookups.get(address)) is None:
            self._lookups[address] = lookup = _looked_up(address)
            lookup.add_done_callback(lambda _: self._lookups.pop(address))
        return await asyncio.shield(lookup)


def _unreachable(host: Host, errors: Sequence[Exception]) -> ServerUnavailable:
    """What these failures of all its addresses say about a host."""
    if broken := [error for error in errors if isinstance(error, ssl.SSLError)]:
        reason = getattr(broken[-1], "verify_message", "") or broken[-1].reason
        return ServerRefused(
            f"no TLS connection to {host.name} ({host.url}): {reason}",
            "correct its URL in hosts.toml, or add its certificate to those that this machine trusts: $SSL_CERT_FILE",
        )
    refused = all(isinstance(error, ConnectionRefusedError) for error in errors)
    return (ServerNotRunning if refused else ServerUnavailable)(
        f"no server answers at {host.url} ({host.name})",
        "start that server; disagg does not manage it"
        if host.whole
        else "run `disagg status`; `disagg start` starts what is stopped",
    )


@cache
def _tls_context() -> ssl.SSLContext:
    """A context with the certificates that this machine trusts. Reading them takes 20 ms."""
    return ssl.create_default_context()


def _looked_up(address: Address) -> asyncio.Future[list[Address]]:
    """The addresses of a name. Not by the event loop, which would not end before the lookup does."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[list[Address]] = loop.create_future()

    def settle(found: list[Address] | Exception) -> None:
        if isinstance(found, Exception):
            result.set_exception(found)
            result.exception()  # nobody may wait for it any more
        else:
            result.set_result(found)

    def look_up() -> None:
        found: list[Address] | Exception
        try:
            infos = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            found = list(dict.fromkeys((str(one[0]), int(one[1])) for *_, one in infos))
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            found = error
        with suppress(RuntimeError):  # the event loop has been closed
            loop.call_soon_threadsafe(settle, found)

    threading.Thread(target=look_up, name=f"look up {address[0]}", daemon=True).start()
    return result
