"""A server's port: TLS, and what callers without it get."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import struct
from contextlib import AbstractAsyncContextManager, suppress

import pytest
from starlette.types import Receive, Scope, Send

from disagg.http.protocol import BoundedProtocol, ConnectionBounds, Encryption
from disagg.tls.certificate import ServerTLS, client_tls
from disagg.tls.transport import HANDSHAKE
from tests.http.served import served

TOKEN = "the-token-of-this-fleet"
PATIENCE_S = 60.0
BOUNDS = ConnectionBounds()
GET = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def scheme(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the scheme that the request came by."""
    body = str(scope["scheme"]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def serving(*, plain: bool, bounds: ConnectionBounds = BOUNDS) -> AbstractAsyncContextManager[int]:
    """The port of a server of `scheme`. plain: it serves connections without TLS, too, as a gateway does."""
    return served(scheme, Encryption(ServerTLS(lambda: (TOKEN,)), plain=plain), bounds)


async def answer(port: int, request: bytes, context: ssl.SSLContext | None = None) -> bytes:
    """All that the server sends until it closes the connection."""
    name = "disagg" if context else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    try:
        async with asyncio.timeout(PATIENCE_S):
            writer.write(request)
            return await reader.read()
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("plain", [False, True])
async def test_a_caller_with_tls_is_served(plain: bool) -> None:
    async with serving(plain=plain) as port:
        assert (await answer(port, GET, client_tls(TOKEN).context)).endswith(b"\r\n\r\nhttps")


@pytest.mark.parametrize("reset", [False, True], ids=["by its end", "by a reset"])
async def test_a_connection_that_was_closed_is_freed_without_the_garbage_collector(reset: bool) -> None:
    """It has buffers of TLS, of which the collector does not know."""

    def left() -> int:
        return sum(type(one) is BoundedProtocol for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        async with serving(plain=False) as port, asyncio.timeout(PATIENCE_S):
            before, context = left(), client_tls(TOKEN).context
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="disagg")
            writer.write(GET.replace(b"Connection: close\r\n", b""))
            assert (await reader.readuntil(b"https")).endswith(b"https") and left() == before + 1
            if reset:
                closed_by_reset = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, closed_by_reset)
            writer.transport.abort()
            while left() > before:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_a_gateway_serves_callers_without_tls_on_the_same_port() -> None:
    async with serving(plain=True) as port:
        assert (await answer(port, GET)).endswith(b"\r\n\r\nhttp")


@pytest.mark.parametrize("request_", [GET, GET + b"x" * 1_000_000, b"\0\1\2", b"G"])
async def test_a_caller_without_tls_gets_one_line_that_says_so_and_nothing_else(request_: bytes) -> None:
    async with serving(plain=False) as port:
        head, _, body = (await answer(port, request_)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and body == b"this server speaks TLS: ask it by https://\n"


@pytest.mark.parametrize("start", [b"", bytes([HANDSHAKE]), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
async def test_a_handshake_has_as_long_as_a_first_head(start: bytes) -> None:
    async with serving(plain=False, bounds=ConnectionBounds(head_s=0.1)) as port:
        with suppress(ConnectionResetError):
            assert await answer(port, start) == b""


async def test_a_caller_with_tls_is_told_where_the_answer_to_what_is_refused_ends() -> None:
    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain:
            context = client_tls(TOKEN).context
            with context.wrap_socket(plain, server_hostname="disagg", suppress_ragged_eofs=False) as secured:
                secured.sendall(b"no request\r\n\r\n")
                return b"".join(iter(lambda: secured.recv(1 << 16), b""))

    async with serving(plain=False) as port:
        assert (await asyncio.to_thread(ask, port)).startswith(b"HTTP/1.1 400 ")


async def test_what_is_no_handshake_after_its_first_byte_is_closed() -> None:
    async with serving(plain=False) as port:
        with suppress(ConnectionResetError):
            assert b"HTTP" not in await answer(port, bytes([HANDSHAKE]) + b"not a handshake")
