"""A caller that goes away while it sends its request. Real sockets, simulated engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from disagg.http.protocol import ConnectionBounds, Encryption
from disagg.servers.app import build
from disagg.servers.host.service import AnyService
from disagg.servers.run import _Server, listener_of
from disagg.tls.certificate import ServerTLS
from disagg.token import Tokens
from tests.servers.host.test_service import serving

PATIENCE_S = 60.0
TOKEN = "test-token-of-sixteen-or-more"
ENCRYPTION = Encryption(ServerTLS(lambda: (TOKEN,)))  # and without: some callers here are sockets
HEAD = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[AnyService]:
    """A decode service behind HTTP."""
    async with serving(tmp_path, "m-decode") as one:
        server = _Server(one, build(one, Tokens(TOKEN)), ENCRYPTION, ConnectionBounds())
        running = asyncio.ensure_future(server.serve([listener_of(one.host)]))
        while not server.started:
            await asyncio.sleep(0)
        yield one
        server.should_exit = True
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait((running,))


@pytest.mark.parametrize("path", ["/decode", "/lease"])
@pytest.mark.parametrize("framing", ["Content-Length: 1000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n5\r\n"])
async def test_a_caller_that_disconnects_during_its_upload_leaves_one_line_and_no_error_in_the_log(
    service: AnyService, path: str, framing: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for reset in (False, True):
        _, writer = await asyncio.open_connection(service.host.address, service.host.port)
        writer.write(f"POST {path} {HEAD}{framing}".encode() + b'{"mod')
        await writer.drain()
        await _answered_health(service)  # the server has read the head by then
        writer.transport.abort() if reset else writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while len(_cancelled(caplog)) < 1 + reset:
                await asyncio.sleep(0.01)
        await _answered_health(service)
    assert len(_cancelled(caplog)) == 2
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert not any(record.exc_info for record in caplog.records)


def _cancelled(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line == "upload_cancelled"]


async def _answered_health(service: AnyService) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            reader, writer = await asyncio.open_connection(service.host.address, service.host.port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            await reader.read()
            writer.close()
