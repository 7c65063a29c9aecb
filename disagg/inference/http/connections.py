"""The open connections of a client."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Self
from urllib.parse import urlsplit

from httptools import HttpParserError

from disagg.config import Host
from disagg.errors import ProtocolError, RequestError
from disagg.inference.http.connection import HostConnection, ResponseHead
from disagg.inference.http.opening import Address, Opener
from disagg.token import Tokens

IDLE_S = 30.0
MAX_IDLE = 64  # of one host
ENDING_S = 1.0  # for a response to end after its last event


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A request to a host. id: names it to its lease and in logs; empty if it has none. key: a whole-request host's,
    empty if it needs none; it never gets the fleet's token. via: its Via header, empty if it has none."""

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
