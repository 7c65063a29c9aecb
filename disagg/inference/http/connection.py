"""One HTTP/1.1 connection, by h11 on asyncio, with the fleet's TLS or without.

Not by httpx: the two requests of a hand-off take it 3.7 ms of CPU, and 45 ms for the first two of a process. This takes
0.8 and 3 ms.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import h11

from disagg.tls.client import client_tls
from disagg.tls.transport import SecureTransport

MAX_UNREAD_BYTES = 1 << 20  # of a response whose reader is slower than its sender

Headers = Sequence[tuple[str, str]]


class HostConnection(asyncio.Protocol):
    """For one request at a time. Raises OSError and h11.RemoteProtocolError if it breaks, TimeoutError if the host is
    silent.

    token: of the fleet, which the host proves that it has (`secured`), and which it may be shown. Without one, there is
    no TLS, or that of asyncio.
    """

    def __init__(self, token: str = "") -> None:
        self.token = token
        self._secure: SecureTransport | None = None
        self._is_free: Callable[[], None] | None = None
        self._h11 = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._head: h11.Response | None = None
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._complete = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether the next request can be sent on it: not if bytes follow the last response."""
        idle = self._h11.our_state is self._h11.their_state is h11.IDLE
        return self._failure is None and idle and self._h11.trailing_data == (b"", False)

    async def secured(self, seconds: float) -> None:
        """Wait until the host has proven that it is one of the fleet. Raises SSLError if it does not, TimeoutError if
        it has not by then, even if it sends something."""
        ends = time.monotonic() + seconds
        while self._secure is not None and not self._secure.established:
            await self._change(max(0.0, ends - time.monotonic()))

    def send(self, method: str, path: str, headers: Headers, body: bytes) -> None:
        """Send a request, in one write."""
        head = h11.Request(method=method, target=path, headers=[*headers, ("Content-Length", str(len(body)))])
        parts = [self._h11.send(head), self._h11.send(h11.Data(body)), self._h11.send(h11.EndOfMessage())]
        if self._transport is None or self._failure is not None:
            raise self._failure or ConnectionError("not connected")
        self._transport.write(b"".join(filter(None, parts)))

    async def head(self, silence_s: float) -> h11.Response:
        """The response's status and headers."""
        while self._head is None:
            await self._change(silence_s)
        return self._head

    async def read(self, silence_s: float) -> bytes:
        """The next piece of the response's body; empty at its end."""
        while not self._unread:
            if self._complete:
                return b""
            await self._change(silence_s)
        piece = self._unread.popleft()
        self._unread_bytes -= len(piece)
        if self._transport is not None and self._unread_bytes < MAX_UNREAD_BYTES:
            self._transport.resume_reading()
        return piece

    def leave(self, is_free: Callable[[], None]) -> None:
        """Nobody reads the rest of the response. is_free: is called when it has ended."""
        self._is_free = is_free
        self._clear()

    def reset(self) -> bool:
        """Drop a response that has ended, for the next request. False if it has not ended, or the host closes."""
        if not (self._complete and self._h11.our_state is self._h11.their_state is h11.DONE):
            return False
        self._h11.start_next_cycle()
        self._head, self._complete, self._is_free = None, False, None
        self._clear()
        return True

    def close(self) -> None:
        """Close the connection at once."""
        self._fail(ConnectionError("the connection was closed"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = below = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        if self.token:
            tls = client_tls(self.token)
            self._transport = self._secure = SecureTransport(below, tls.context, tls)
            self._secure.decrypt(b"")

    def data_received(self, data: bytes) -> None:
        if self._secure is None:
            self._receive(data)
            return
        try:
            data = self._secure.decrypt(data)
        except ssl.SSLError as error:
            self._fail(error)
            return
        if data:
            self._receive(data)
        if self._secure.ended:
            self._receive(b"")
        _wake(self._waiter)

    def eof_received(self) -> None:
        if self._secure is None:
            self._receive(b"")  # the end of a response without a length
        elif not self._secure.ended:
            self._fail(ConnectionError("the host closed the connection"))

    def _receive(self, data: bytes) -> None:
        try:
            self._h11.receive_data(data)
            self._take()
        except h11.RemoteProtocolError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the host closed the connection"))

    def _take(self) -> None:
        """Note what has arrived."""
        while True:
            event = self._h11.next_event()
            if isinstance(event, h11.Response):
                self._head = event
            elif isinstance(event, h11.Data):
                self._keep(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self._complete = True
            elif not isinstance(event, h11.InformationalResponse):  # NEED_DATA, PAUSED, ConnectionClosed
                break
        _wake(self._waiter)
        if self._complete and self._is_free is not None:
            self._is_free()

    def _keep(self, piece: bytes) -> None:
        if self._is_free is not None:
            return
        self._unread.append(piece)
        self._unread_bytes += len(piece)
        if self._transport is not None and self._unread_bytes >= MAX_UNREAD_BYTES:
            self._transport.pause_reading()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        if self._transport is not None:
            self._transport.abort()
        _wake(self._waiter)

    def _clear(self) -> None:
        self._unread.clear()
        self._unread_bytes = 0
        if self._transport is not None:
            self._transport.resume_reading()

    async def _change(self, seconds: float) -> None:
        """Wait until something has arrived. The timer cannot overtake what has arrived by then, as a cancellation by
        asyncio.timeout would in a process that was stopped meanwhile."""
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(seconds, _expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
