"""disagg/http/lazy.py: how much is read and parsed, and what becomes of a connection afterwards. Real sockets."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from disagg.http.lazy import READ_BYTES, LazyProtocol
from disagg.http.protocol import ConnectionBounds
from tests.http.served import PATIENCE_S, served

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def unread(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def in_parts(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers in parts, of a length that is not known before."""
    await StreamingResponse(iter([b"one ", b"two"]))(scope, receive, send)


async def received(port: int, *sent: bytes) -> bytes:
    """All that comes until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for piece in sent:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("body", [b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"])
async def test_an_answer_before_the_whole_request_ends_the_connection(body: bytes) -> None:
    async with served(unread) as port:
        answer = await received(port, POST + body, b"x" * 90_000)
    assert b"\r\nconnection: close\r\n" in answer and answer.endswith(b"\r\n\r\nok")


async def test_a_connection_goes_on_after_an_answer_to_a_request_that_was_complete() -> None:
    async with served(unread) as port:
        assert (await received(port, GET, GET, LAST)).count(b"HTTP/1.1 200 ") == 3


async def test_http_1_0_gets_no_chunks_and_its_answer_ends_with_the_connection() -> None:
    async with served(in_parts) as port:
        answer = await received(port, b"GET / HTTP/1.0\r\n\r\n")
        head, _, content = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head and content == b"one two"
        assert b"transfer-encoding: chunked" in await received(port, LAST)


async def test_a_second_head_has_as_long_as_the_first() -> None:
    async with served(unread, bounds=ConnectionBounds(head_s=0.2)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + GET[:20])
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionResetError):
                assert (await reader.read()).count(b"HTTP/1.1 200 ") == 1
        writer.close()


async def test_a_connection_reads_little_at_a_time_and_no_more_than_the_application_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, asked = list[int](), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asked.wait()
        assert len(await Request(scope, receive).body()) == 4 << 20
        await unread(scope, receive, send)

    def noted(self: LazyProtocol, data: bytes) -> None:
        reads.append(len(data))
        note(self, data)

    note = LazyProtocol.data_received
    monkeypatch.setattr(LazyProtocol, "data_received", noted)
    async with served(slow) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (4 << 20) + b"x" * (4 << 20))
        await received(port, b"no request\r\n\r\n")  # in whose time all was read that is read
        assert sum(reads) <= 3 * READ_BYTES
        asked.set()
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.read()).endswith(b"ok")
        writer.close()
    assert max(reads) <= READ_BYTES
