"""One HTTP/1.1 connection of a client, whose response is passed on while it is read, with the fleet's TLS or without.

httptools parses (C, 0.9 ms to import). httpx takes 3.7 ms of CPU for the two requests of a hand-off, and aiohttp 130 ms
to import.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from disagg.errors import RequestError
from disagg.tls.certificate import client_tls
from disagg.tls.transport import SecureTransport

READ_BYTES: Final = 1 << 16
MAX_UNREAD_BYTES: Final = 1 << 20  # that are kept of a response whose reader is slower than its sender
MAX_HEAD_BYTES: Final = 1 << 16
"""The most in a row that is no body: a head, or what a chunk or the end of a response states beside its length."""
GRACE_S: Final = 0.005
"""After a wait is over, for what has arrived meanwhile: uvloop looks at its timers before it reads."""

Headers = Sequence[tuple[str, str]]
Take = Callable[[bytes], bool]
"""Gets a piece of a body as it is read from the socket; returns whether it has enough."""


@dataclass(slots=True)
class ResponseHead:
    """Names of headers are in lower case."""

    status: int
    headers: dict[str, str]


class HostConnection(asyncio.BufferedProtocol):
    """A connection for one request at a time. Raises OSError and HttpParserError if it breaks, TimeoutError if the host
    is silent. What it has beside the parser are the bounds and waits of a response that nobody trusts.

    token: the fleet's token, which the host proves that it has (`secured`), and which it may be shown. Without one,
    there is no TLS, or asyncio does it. buffer: gets what is read from the sockets of all connections, in turn: memory
    does not grow with their number, and none is allocated for a read (asyncio allocates 256 KiB).
    """

    def __init__(self, buffer: memoryview, token: str = "") -> None:
        self.token = token
        self._buffer = buffer
        self._transport: asyncio.Transport | None = None
        self._secure: SecureTransport | None = None
        self._parser = HttpResponseParser(self)
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._latest = self._due = inf
        self._over = self._surplus = False
        self._timer: asyncio.TimerHandle | None = None
        self._forget()

    def _forget(self) -> None:
        """Be ready for the next request."""
        self._asked = self._complete = self._interim = self._kept_alive = False
        self._head: ResponseHead | None = None
        self._headers: dict[str, str] = {}
        self._outside = 0
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._take: Take | None = None
        self._is_free: Callable[[], None] | None = None

    @property
    def usable(self) -> bool:
        """Whether the next request can be sent on it: not if bytes follow the last response."""
        return self._failure is None and self._transport is not None and not (self._asked or self._surplus)

    async def secured(self, seconds: float) -> None:
        """Wait until the host has proven that it is one of the fleet. Raises SSLError if it does not, TimeoutError if
        it has not by then, even if it sends something."""
        if self._secure is not None and not self._secure.established:
            await self._wait(time.monotonic() + seconds)

    def send(self, method: str, path: str, headers: Headers, body: bytes) -> None:
        """Send a request, in one write. Raises RequestError if a header is not one line of ASCII."""
        lines = [f"{method} {path} HTTP/1.1"]
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            if not value.isascii() or not value.isprintable():
                raise RequestError(f"the header {name} of a request must be one line of ASCII")
            lines.append(f"{name}: {value}")
        if self._transport is None or self._failure is not None:
            raise self._failure or ConnectionError("not connected")
        self._asked = True
        self._transport.write("\r\n".join((*lines, "", "")).encode("ascii") + body)

    async def head(self, silence_s: float) -> ResponseHead:
        """The response's status and headers."""
        if self._head is None:
            await self._wait(time.monotonic() + silence_s)
        assert self._head is not None, "a wait without one raises"
        return self._head

    async def follow(self, take: Take, latest: float) -> bool:
        """Pass each piece of the body on as soon as it is read, until that is enough; False if the body ends before.
        The pieces wake nobody. What `take` raises is raised here. latest: see `extend`."""
        while self._unread:
            if take(self._next_unread()):
                return True
        if self._complete:
            return False
        self._take = take
        try:
            return await self._wait(latest)
        finally:
            self._take = None

    def extend(self, latest: float) -> None:
        """Wait until this time, by time.monotonic(). A wait has no timer of its own: the connection's looks again when
        the time that it was set for has passed."""
        self._latest, self._over = latest, False
        if self._timer is None or latest < self._due:
            self._look_at(latest)

    def leave(self, is_free: Callable[[], None]) -> None:
        """Nobody reads the rest of the response. is_free: is called when it has ended."""
        self._is_free = is_free
        self._unread.clear()
        self._unread_bytes = 0
        self._resume()

    def reset(self) -> bool:
        """Drop a response that has ended, for the next request. False if it has not ended, or the host closes."""
        if self._failure is not None or not (self._complete and self._kept_alive):
            return False
        self._forget()
        self._resume()
        return True

    def close(self) -> None:
        """Close the connection at once."""
        self._failure = None  # the traceback of one that was raised refers to this
        self._fail(ConnectionError("the connection was closed"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = below = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        if self.token:
            tls = client_tls(self.token)
            self._transport = self._secure = SecureTransport(below, tls.context, tls)
            self._secure.decrypt(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data: bytes | memoryview = self._buffer[:nbytes]
        if (secure := self._secure) is not None:
            proven = secure.established
            try:
                data = secure.decrypt(data)
            except ssl.SSLError as error:
                self._fail(error)
                return
            if not proven and secure.established:
                self._settle(True)
        if data:
            self._parse(data)
        if secure is not None and secure.ended:
            self._end()

    def eof_received(self) -> None:
        if self._secure is None:
            self._end()
        elif not self._secure.ended:
            self._fail(ConnectionError("the host closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the host closed the connection"))
        del self._parser  # it refers to this, which only the garbage collector would free then, with 17 KB of TLS

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._surplus = self._surplus or self._complete  # another response, which nobody has asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None and not self._surplus:
            self._headers[name.decode("ascii", "replace").lower()] = value.decode("ascii", "replace")

    def on_headers_complete(self) -> None:
        if self._surplus:
            return
        status = self._parser.get_status_code()
        self._interim = status < 200
        if not self._interim:
            self._head = ResponseHead(status, self._headers)
            self._kept_alive = self._parser.should_keep_alive()
            if self._take is None:
                self._settle(True)

    def on_body(self, piece: bytes) -> None:
        self._outside = 0
        if self._surplus or self._is_free is not None:
            return
        if self._take is None:
            self._keep(piece)
            return
        try:
            enough = self._take(piece)
        except Exception as error:  # noqa: BLE001 - raised by `follow`
            self._take = None
            self._settle(error)
        else:
            if enough:
                self._take = None
                self._settle(True)

    def on_message_complete(self) -> None:
        if self._interim:
            self._headers = {}
        elif not self._surplus:
            self._complete = True

    def _parse(self, data: bytes | memoryview) -> None:
        if not self._asked:
            self._fail(HttpParserError("the host has sent what nobody asked for"))
            return
        self._outside += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._fail(HttpParserError("the host changes to another protocol"))
            return
        except HttpParserError as error:
            if isinstance(interrupt := error.__context__, KeyboardInterrupt):  # in what the parser has called
                raise interrupt from None
            if not self._complete:
                self._fail(error)
                return
            self._surplus = True
        if self._complete:
            self._ended()
        elif self._outside > MAX_HEAD_BYTES:
            self._fail(HttpParserError(f"over {MAX_HEAD_BYTES} bytes that are no body"))

    def _end(self) -> None:
        """The host sends nothing more: the end of a response without a length, or too early."""
        self._kept_alive = False
        if self._head is not None and not self._headers.keys() & {"content-length", "transfer-encoding"}:
            self._complete = True
        if self._complete:
            self._ended()
        else:  # not as if the link had broken: a whole-request host that does so is not asked again and again
            self._fail(HttpParserError("the host closed the connection"))

    def _ended(self) -> None:
        self._settle(False)
        if self._is_free is not None:
            self._is_free()

    def _keep(self, piece: bytes) -> None:
        self._unread.append(piece)
        self._unread_bytes += len(piece)
        if self._transport is not None and self._unread_bytes >= MAX_UNREAD_BYTES:
            self._transport.pause_reading()

    def _next_unread(self) -> bytes:
        piece = self._unread.popleft()
        self._unread_bytes -= len(piece)
        if self._unread_bytes < MAX_UNREAD_BYTES:
            self._resume()
        return piece

    def _resume(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
        self._settle(error)

    async def _wait(self, latest: float) -> bool:
        """Wait until what is waited for is there, or the response has ended: then False. The timer cannot overtake what
        has arrived by then, as a cancellation by asyncio.timeout would in a process that was stopped meanwhile."""
        if self._failure is not None:
            raise self._failure
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        self.extend(latest)
        try:
            return await waiter
        finally:
            self._waiter = None
            del waiter  # it has the exception, whose traceback has this frame

    def _settle(self, result: bool | Exception) -> None:
        """End the wait, if there is one."""
        if (waiter := self._waiter) is None or waiter.done():
            return
        if isinstance(result, Exception):
            waiter.set_exception(result)
        else:
            waiter.set_result(result)

    def _look_at(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, due - time.monotonic()), self._look)

    def _look(self) -> None:
        """Raise TimeoutError where it is waited, if the time is over."""
        self._timer = None
        if self._waiter is None:
            return
        now = time.monotonic()
        if now < self._latest:
            self._look_at(self._latest)
        elif not self._over:
            self._over = True
            self._look_at(now + GRACE_S)
        else:
            self._settle(TimeoutError())
