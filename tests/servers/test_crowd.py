"""A server with more connections and fewer descriptors than it would like. Real sockets, simulated engine."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from disagg.api.events import ErrorAnswer
from disagg.api.status import Load
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
WITH_TOKEN = {"Authorization": f"Bearer {TOKEN}"}
LONG = {"model": "m", "tokens": [9] * 40, "sampling": {"max_tokens": 10_000, "ignore_eos": True}}
SHORT = {"model": "m", "tokens": [9] * 40, "sampling": {"max_tokens": 3}}


@pytest.fixture
def bounds() -> ConnectionBounds:
    return ConnectionBounds()


@pytest.fixture
async def service(tmp_path: Path, bounds: ConnectionBounds) -> AsyncIterator[AnyService]:
    """A decode service behind HTTP."""
    async with serving(tmp_path, "m-decode") as one:
        server = _Server(one, build(one, Tokens(TOKEN)), ENCRYPTION, bounds)
        running = asyncio.ensure_future(server.serve([listener_of(one.host)]))
        while not server.started:
            await asyncio.sleep(0)
        yield one
        server.should_exit = True
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait((running,))


def client(service: AnyService, **headers: str) -> httpx.AsyncClient:
    url = service.host.url
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False, verify=False)


async def polling(service: AnyService) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A kept-alive connection that has polled bare /health."""
    reader, writer = await asyncio.open_connection(service.host.address, service.host.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b'{"status":"ok"}')
    return reader, writer


@pytest.mark.parametrize("bounds", [ConnectionBounds(unproven=3)])
async def test_connections_that_only_polled_bare_health_make_room(service: AnyService) -> None:
    pollers = [await polling(service) for _ in range(3)]
    async with client(service, **WITH_TOKEN) as caller:
        assert (await caller.get("/load")).status_code == httpx.codes.OK
        more = [await polling(service) for _ in range(3)]
        assert (await caller.get("/load")).extensions["network_stream"] is not None
    async with asyncio.timeout(PATIENCE_S):
        assert await pollers[0][0].read() == b"", "the longest idle one was closed"
    for _, writer in [*pollers, *more]:
        writer.close()


@pytest.mark.parametrize("bounds", [ConnectionBounds(unproven=2, new_s=math.inf, head_s=1e6)])
async def test_connections_that_were_just_opened_stay_and_a_caller_with_the_token_has_a_place(
    service: AnyService,
) -> None:
    opened = [await asyncio.open_connection(service.host.address, service.host.port) for _ in range(2)]
    async with client(service, **WITH_TOKEN) as caller:
        answer = await caller.post("/generate", json=SHORT)
    assert answer.status_code == httpx.codes.OK
    for reader, writer in opened:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')
        writer.close()


@pytest.mark.parametrize("bounds", [ConnectionBounds(head_s=0.1)])
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET /health HTTP/1.1\r\n"])  # of a handshake, of a head
async def test_a_connection_that_never_sends_a_whole_head_is_closed(service: AnyService, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection(service.host.address, service.host.port)
    writer.write(sent)
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionResetError):
            assert b"HTTP/1.1 200" not in await reader.read()
    writer.close()


@pytest.mark.parametrize("bounds", [ConnectionBounds(connections=1)])
async def test_a_caller_without_a_place_gets_503_and_health_is_still_answered(service: AnyService) -> None:
    async with client(service, **WITH_TOKEN) as busy, busy.stream("POST", "/generate", json=LONG) as answer:
        lines = answer.aiter_lines()  # held: the response closes when its iterator is dropped
        await anext(lines)
        async with client(service, **WITH_TOKEN) as late:
            refused = await late.post("/generate", json={**SHORT, "tokens": [9] * 10_000})
        assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE and refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        assert "no place" in ErrorAnswer.from_bytes(refused.content).error.message
        async with client(service, **WITH_TOKEN) as view:
            assert Load.from_bytes((await view.get("/load")).content).running == 1
        async with client(service) as anyone:
            assert (await anyone.get("/health")).json() == {"status": "ok"}


async def test_a_stalled_engine_is_reported_with_503_by_health_and_as_a_state_by_load(service: AnyService) -> None:
    service.stalled = True
    async with client(service, **WITH_TOKEN) as caller:
        for path, status in (("/health", httpx.codes.SERVICE_UNAVAILABLE), ("/load", httpx.codes.OK)):
            answer = await caller.get(path)
            assert answer.status_code == status and answer.json()["status"] == "stalled"
        refused = await caller.post("/generate", json=SHORT)
    assert refused.status_code == httpx.codes.BAD_GATEWAY
    assert "no progress" in ErrorAnswer.from_bytes(refused.content).error.message
    service.stalled = False


async def test_a_lease_is_extended_over_http(service: AnyService) -> None:
    async with client(service, **WITH_TOKEN) as caller:
        answer = await caller.post("/lease", json={"request_ids": ["gone"]})
        assert answer.json() == {"unknown": ["gone"]}
        assert (await caller.post("/lease", json={"request_ids": "x"})).status_code == httpx.codes.BAD_REQUEST


async def test_a_caller_that_leaves_during_its_upload_leaves_no_error_in_the_log(
    service: AnyService, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection(service.host.address, service.host.port)
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 1000\r\n\r\n"
    writer.write(head.encode() + b"{")
    await writer.drain()
    async with client(service, **WITH_TOKEN) as caller:  # answered after the upload has begun
        await caller.get("/load")
    writer.close()
    await writer.wait_closed()
    async with client(service, **WITH_TOKEN) as caller:
        await caller.get("/load")
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_bug_is_logged_once(
    service: AnyService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "load_figures", lambda: 1 / 0)
    async with client(service, **WITH_TOKEN) as caller:
        answer = await caller.get("/load")
    assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    assert "internal error" in ErrorAnswer.from_bytes(answer.content).error.message
    assert len([record for record in caplog.records if record.exc_info]) == 1


async def test_a_draining_server_refuses_what_has_not_begun_and_finishes_what_runs(service: AnyService) -> None:
    async with client(service, **WITH_TOKEN) as caller, client(service, **WITH_TOKEN) as waiting:
        body = {**LONG, "sampling": {"max_tokens": 200, "ignore_eos": True}}
        async with caller.stream("POST", "/generate", json=body) as runs:
            lines = runs.aiter_lines()
            await anext(lines)
            async with waiting.stream("POST", "/decode", json={**SHORT, "cache_salt": "unheld"}) as slot:
                slot_lines = slot.aiter_lines()
                assert await anext(slot_lines) == "event: slot"
                service.drain()
                rest = "\n".join([line async for line in slot_lines])
            refused = await waiting.post("/generate", json=SHORT)
            answered = "\n".join([line async for line in lines])
        health = await waiting.get("/health")
    assert "m-decode is shutting down" in rest and "event: done" in answered
    assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE and refused.headers["retry-after"] == "5"
    assert health.json()["status"] == "draining" and service.active == {}
