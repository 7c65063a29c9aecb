"""HTTP/1.1 that is parsed no further than it is needed.

uvicorn parses whatever arrives: bodies in chunks of one byte kept it busy for seconds. Here a connection reads at most
READ_BYTES at a time, of which uvloop takes up to 32 in one turn, unless reading is paused meanwhile. The body of a
request is parsed as the application asks for it, the next request once this one has been answered, and nothing of what
follows a refusal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from disagg import logs
from disagg.errors import RequestError
from disagg.http.arrival import MAX_FIELDS, MAX_HEAD_BYTES, Arrival, ArrivingBody, Refused, checked, end_of_lines
from disagg.http.stream import PART_WRITER

READ_BYTES: Final = 16 << 10
DROP_S = 2.0
DROP_BYTES: Final = 1 << 20
"""What still arrives after the answer to a request that was not read is dropped, for so long and so much: a connection
that is closed with unread data is reset, and its caller would never see the answer."""


class LazyProtocol(HttpToolsProtocol, asyncio.BufferedProtocol):
    """uvicorn's httptools protocol, which by itself parses all that arrives. read_buffer: has READ_BYTES, for
    all connections of one event loop."""

    cycle: BoundedCycle | None  # type: ignore[assignment]  # as uvicorn uses it

    def __init__(self, *arguments: Any, read_buffer: memoryview) -> None:
        super().__init__(*arguments)
        self.arrival = Arrival()
        self._read_buffer = read_buffer
        self._body: ArrivingBody | None = None
        self._held = b""  # has arrived, and is not parsed yet
        self._dropping: asyncio.TimerHandle | None = None
        self._dropped = 0

    def connection_lost(self, exc: Exception | None) -> None:
        if self._dropping is not None:
            self._dropping.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn's timer goes on after a reset

    @property
    def between_requests(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def dropping(self) -> bool:
        """Whether what still arrives is dropped."""
        return self._dropping is not None

    # From the connection to the parser

    def get_buffer(self, sizehint: int) -> memoryview:  # as asyncio calls it
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:  # as asyncio calls it
        if self._dropping is None:
            self.data_received(bytes(self._read_buffer[:nbytes]))
            return
        self._dropped += nbytes
        if self._dropped > DROP_BYTES:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            opened = self.opened(data)
            self.arrival.pieces += 1
            self.arrival.framing += len(data) - len(opened)
            self.arrival.check()
        except Refused as refusal:
            self._refuse(refusal)
            return
        if opened:
            self._held += opened
            self.parse()

    def opened(self, data: bytes) -> bytes:
        """What the caller has sent in these bytes of its connection. Raises Refused."""
        return data

    def parse(self) -> None:
        """Parse what is held, as far as it may be: a head if no request is answered, the body of one as it is read. The
        rest stays held, and until then nothing more is read."""
        self._unset_keepalive_if_required()
        data, at = self._held, 0
        try:
            while (end := self._parse_to(data, at)) > at:
                self._parse_part(data[at:end])
                at = end
        except Refused as refusal:
            self._held = b""
            self._refuse(refusal)
        else:
            self._held = data[at:]

    def _parse_to(self, data: bytes, at: int) -> int:
        """The index up to which the bytes from `at` may be parsed now."""
        if self.between_requests:
            return end_of_lines(data, at)
        assert self.cycle is not None and self._body is not None
        if self.cycle.reading and self.cycle.failure is None and not self._body.complete:
            return self._body.end(data, at)
        if at < len(data):
            self.flow.pause_reading()
        return at

    def _parse_part(self, part: bytes) -> None:
        """Parse these bytes, which are of one head or one body. Raises Refused."""
        try:
            if self.between_requests:
                self._parse_head(part)
            else:
                self._parse_body(part)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, Refused):
                raise error.__context__ from None
            raise Refused(400, f"the request is not valid HTTP: {error}") from None
        self.arrival.check()

    def _parse_head(self, part: bytes) -> None:
        self.arrival.content += len(part)
        if self.arrival.content > MAX_HEAD_BYTES:
            raise Refused(431, f"the head of a request has at most {MAX_HEAD_BYTES} bytes")
        with suppress(httptools.HttpParserUpgrade):  # the offer is not accepted
            self.parser.feed_data(part)

    def _parse_body(self, part: bytes) -> None:
        assert self.cycle is not None and self._body is not None
        before = self.arrival.content
        self._body.feed(part)
        self.arrival.framing += len(part) - (self.arrival.content - before)
        if self._body.complete:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    # What the parser finds

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_FIELDS:
            raise Refused(431, f"the head of a request has at most {MAX_FIELDS} fields")
        super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        version, scope = self.parser.get_http_version(), self.scope
        self._body = ArrivingBody(checked(self.url, version, self.headers), self.on_body)
        path, _, query = self.url.partition(b"?")
        scope["method"], scope["http_version"] = self.parser.get_method().decode("ascii"), version
        scope["path"], scope["raw_path"], scope["query_string"] = unquote(path.decode("ascii")), path, query
        self.cycle = BoundedCycle(
            self.parse,
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version == "1.1" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        scope["state"][PART_WRITER] = self.cycle
        if self._body.complete:
            self.cycle.more_body = False
            self.cycle.message_event.set()
        self._start_asgi_task(self.cycle, self.app)

    def on_message_complete(self) -> None:  # of a head: `_body` finds the end of its body
        pass

    def on_body(self, body: bytes) -> None:
        assert self.cycle is not None
        self.arrival.pieces += 1
        self.arrival.content += len(body)
        self.arrival.check()
        self.cycle.body += body
        self.cycle.message_event.set()

    # Ends

    def on_response_complete(self) -> None:
        assert self.cycle is not None
        if self.cycle.more_body and not self.transport.is_closing():
            self.server_state.total_requests += 1
            self.drop()
            return
        super().on_response_complete()
        if not self.transport.is_closing():
            self.arrival, self._body = Arrival(), None
            self.parser = httptools.HttpRequestParser(self)
            if self._held:
                self.parse()

    def _refuse(self, refusal: Refused) -> None:
        """Answer what has arrived, let the application answer it, or cut its answer to a request that was complete."""
        if self.transport.is_closing():
            return
        logs.event(logging.WARNING, "request_refused", reason=str(refusal))
        if self.between_requests:
            self._answer(refusal)
        elif self.cycle is not None and self.cycle.more_body:
            self.cycle.failure = RequestError(str(refusal))
            self.cycle.message_event.set()
            self.flow.pause_reading()
        else:
            self.transport.abort()

    def _answer(self, refusal: Refused) -> None:
        body = f"{refusal}\n".encode()
        fields = [*self.server_state.default_headers, (b"content-type", b"text/plain; charset=utf-8")]
        fields += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        lines = [STATUS_LINE[refusal.status], *(b"%b: %b\r\n" % field for field in fields), b"\r\n", body]
        try:
            self.transport.write(b"".join(lines))
        except ConnectionError:  # a handshake that is not complete
            self.transport.abort()
        else:
            self.drop()

    def drop(self) -> None:
        """Send what has been written and nothing more, and close the connection when the caller does, or soon."""
        self._held = b""
        self._unset_keepalive_if_required()
        self._dropping = self.loop.call_later(DROP_S, self.transport.close)
        with suppress(OSError):  # the caller has gone
            self.transport.write_eof()
        self.flow.resume_reading()


class BoundedCycle(RequestResponseCycle):
    """One request and its response; a PartWriter. uvicorn's cycle goes on reading a body whose answer is sent, and
    writes from a task only. more: parses what has arrived of the body. reading: the application waits for more of
    it. failure: why no more of it is read."""

    def __init__(self, more: Callable[[], None], **options: Any) -> None:
        super().__init__(**options)
        self.reading = False
        self.failure: RequestError | None = None
        self._more = more
        self._ends_with_connection = options["scope"]["http_version"] == "1.0"

    @property
    def writable(self) -> bool:
        return bool(self.chunked_encoding) and not self.flow.write_paused

    def write_part(self, part: bytes) -> None:
        if not self.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    async def run_asgi(self, app: ASGI3Application) -> None:
        try:
            await super().run_asgi(app)
        finally:  # else only the garbage collector would free this and its connection, with 25 KB of TLS
            self._more = _nothing
            self.scope["state"].pop(PART_WRITER)

    async def receive(self) -> ASGIReceiveEvent:
        """Raises RequestError if the body is not one that is read."""
        if not self.more_body:
            return await super().receive()
        self.reading = True
        try:
            self._more()
            if self.failure is not None:
                raise self.failure
            return await super().receive()
        finally:
            self.reading = False

    async def send(self, message: ASGISendEvent) -> None:
        if not self.response_started:
            self.keep_alive = self.keep_alive and not self.more_body
        elif self.more_body and not message.get("more_body", False):
            self.keep_alive = True  # uvicorn does not close the connection; `on_response` does when it may
        if self._ends_with_connection:  # uvicorn would send chunks, which HTTP/1.0 does not have
            self.chunked_encoding = False
            if message["type"] == "http.response.body":
                self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def _nothing() -> None:
    pass
