"""The servers of hosts and gateways, with every body of tests/hostile/bodies.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from disagg.gateway.clients.keys import KeyFile
from disagg.http import lazy
from disagg.http.arrival import Arrival, ArrivingBody, Refused
from disagg.http.protocol import Encryption
from disagg.servers.app import build
from disagg.tls.certificate import ServerTLS, unchecked_context
from disagg.token import Tokens
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient
from tests.hostile import bodies
from tests.hostile.bodies import BODIES, PATIENCE_S, Port
from tests.http.served import served
from tests.servers.host.test_service import serving

TOKEN = "test-token-of-sixteen-or-more"
TINY = next(body for body in BODIES if body.name == "chunks of one byte")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Port]:
    """A gateway's port and its key."""
    keys = tmp_path / "keys.json"
    key = KeyFile(keys).add("test")
    async with served(fake_client.app(FakeClient("text "), keys)) as port:
        yield Port(port, "/api/show", b'{"model": "m"}', key)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Port]:
    """A host's port and the fleet's token."""
    async with serving(tmp_path, "m-decode") as service:
        encryption = Encryption(ServerTLS(lambda: (TOKEN,)), plain=False)
        async with served(build(service, Tokens(TOKEN)), encryption) as port:
            yield Port(port, "/lease", b'{"request_ids": []}', TOKEN, unchecked_context())


async def test_a_gateway_reads_a_body_or_refuses_it_and_answers_others(gateway: Port) -> None:
    await bodies.check(gateway)


async def test_a_host_reads_a_body_or_refuses_it_and_answers_others(host: Port) -> None:
    await bodies.check(host)


async def test_a_caller_without_a_key_is_refused_before_anything_of_its_body_is_parsed(
    gateway: Port, host: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ArrivingBody, "feed", fail)
    for server in (gateway, host):
        await bodies.check(server._replace(token=""), [replace(body, read=False) for body in BODIES if not body.rate])


async def test_a_caller_that_waits_for_its_answer_is_refused_before_it_sends_its_body(gateway: Port) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /api/show HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
    writer.close()


@pytest.mark.parametrize("bound", ["DROP_S", "DROP_BYTES"])
async def test_a_caller_that_sends_on_after_its_refusal_is_cut(
    gateway: Port, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(lazy, "DROP_S", 0.1 if bound == "DROP_S" else 1e6)
    monkeypatch.setattr(lazy, "DROP_BYTES", 100_000 if bound == "DROP_BYTES" else 1 << 40)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /api/show HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"1\r\nx\r\n" * 100)
                await writer.drain()
                await asyncio.sleep(0)
    writer.transport.abort()


async def test_a_body_in_too_many_pieces_is_refused_in_the_form_of_the_call(gateway: Port) -> None:
    answer = await bodies.send(gateway, TINY)
    assert answer.status == 400 and "too many pieces: send 64 bytes at a time" in json.loads(answer.content)["error"]


@pytest.mark.parametrize(
    ("pieces", "content", "framing", "refused"),
    [
        (4096, 0, 0, ""),
        (4097, 0, 0, "too many pieces"),
        (4097, 64, 0, ""),
        (4096 + 1000, 64_000, 0, ""),
        (4096 + 1001, 64_000, 0, "too many pieces"),
        (1, 0, 65_536, ""),
        (1, 0, 65_537, "too many bytes around"),
        (1, 1000, 66_536, ""),
    ],
)
def test_how_a_request_may_arrive(pieces: int, content: int, framing: int, refused: str) -> None:
    arrival = Arrival(pieces, content, framing)
    with pytest.raises(Refused, match=refused) if refused else nullcontext():
        arrival.check()


def fail(*_: object) -> None:
    raise AssertionError("a body was parsed")
