"""disagg/http/accept.py: accepting connections, and the options of their sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from disagg.http import accept as accept_module
from disagg.http.accept import UNACKNOWLEDGED_S, accept, set_options

PATIENCE_S = 60.0


async def test_without_descriptors_a_server_waits_and_does_not_fill_its_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept_module, "RETRY_S", 0.02)
    loop, tries = asyncio.get_running_loop(), 0
    real = loop.sock_accept

    async def sock_accept(listener: socket.socket) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return await real(listener)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    accepted = asyncio.Event()

    class Greeting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.set()
            transport.close()

    freed = iter([True, False, False])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepting = asyncio.ensure_future(accept(listener, Greeting, lambda: next(freed)))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(PATIENCE_S):
            await accepted.wait()
            assert await reader.read() == b""
        writer.close()
        accepting.cancel()
        await asyncio.wait((accepting,))
    assert [record.getMessage() for record in caplog.records] == ["cannot_accept"] * 3


def test_the_kernel_finds_out_that_a_caller_is_gone() -> None:
    with socket.socket() as connection:
        set_options(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert ms == UNACKNOWLEDGED_S * 1000
