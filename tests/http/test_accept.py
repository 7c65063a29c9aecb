"""disagg/http/server.py: accepting connections, and the options of their sockets."""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
import warnings
from typing import Any

import pytest

from disagg.errors import FleetError
from disagg.http import server
from disagg.http.server import UNACKNOWLEDGED_S, accept, set_options

PATIENCE_S = 60.0


class Listener(socket.socket):
    """A listening socket whose first `failures` calls of accept find no descriptor."""

    failures = 0

    def __init__(self) -> None:
        super().__init__()
        self.bind(("127.0.0.1", 0))
        self.listen()
        self.setblocking(False)

    def accept(self) -> Any:
        if self.failures > 0:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


class Closing(asyncio.Protocol):
    """Closes each connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def test_without_descriptors_a_server_waits_and_does_not_fill_its_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "RETRY_S", 0.02)
    freed = iter([True, False, False])
    with Listener() as listener:
        listener.failures = 3
        accepting = asyncio.ensure_future(accept(listener, Closing, lambda: next(freed)))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()
        accepting.cancel()
        await asyncio.wait((accepting,))
    assert [record.getMessage() for record in caplog.records] == ["cannot_accept"] * 3


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_comes_as_the_server_stops_is_closed(turns: int) -> None:
    """Stopped after so many turns of the event loop: before it is accepted, meanwhile, and after."""
    with warnings.catch_warnings(record=True) as seen, Listener() as listener:
        warnings.simplefilter("always")
        accepting = asyncio.ensure_future(accept(listener, Closing, lambda: False))
        await asyncio.sleep(0)
        with socket.create_connection(listener.getsockname(), PATIENCE_S):
            for _ in range(turns):
                await asyncio.sleep(0)
            accepting.cancel()
            await asyncio.wait((accepting,))
            for _ in range(6):  # what the transport has scheduled
                await asyncio.sleep(0)
        del accepting
        gc.collect()
    assert [str(one.message) for one in seen] == []


def test_the_kernel_finds_out_that_a_caller_is_gone() -> None:
    with socket.socket() as connection:
        set_options(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert ms == UNACKNOWLEDGED_S * 1000


def test_a_port_for_which_root_is_needed_is_not_blamed_on_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("disagg.http.server.socket.socket", Refused)
    hints = server.ListenHints("choose another with --port", "check --host")
    with pytest.raises(FleetError, match=r"cannot listen on 127\.0\.0\.1:80: Permission denied") as raised:
        server.listen("127.0.0.1", 80, hints)
    assert raised.value.hint == "choose another with --port; one over 1023 needs no root"
