"""Connections are kept between requests, and replaced if the host has closed them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import h11
import pytest

from disagg.api.events import DoneEvent, ProgressEvent
from disagg.errors import ServerSilent, ServerUnavailable
from disagg.inference.http import calls
from disagg.inference.http.connections import Connections, HostRequest
from disagg.token import Tokens
from tests.inference.scripted import Server, described_host

DONE = (
    b'event: done\ndata: {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1, '
    b'"computed_prompt_tokens": 1, "timing": {}}\n\n'
)
OLD, NEW = "the-old-token-of-this-fleet", "the-new-token-of-this-fleet"


class KeepingHost(Server):
    """Answers requests with a `done` event and keeps the connection for `each` of them; sends the response's end after
    `end`, with the bytes `behind` it."""

    def __init__(self, each: int = 99, behind: bytes = b"") -> None:
        super().__init__()
        self.each, self.behind = each, behind
        self.accepted = 0
        self.heads: list[bytes] = []
        self.end = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        for _ in range(self.each):
            self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            await reader.readuntil(b"}")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(DONE), DONE))
            await self.end.wait()
            writer.write(b"0\r\n\r\n" + self.behind)


async def ask(http: Connections, port: int) -> DoneEvent:
    call = calls.EventCall(described_host("d", port), "/generate", ProgressEvent(phase="", beats=0), "r")
    return await calls.closing_event(http, call, DoneEvent)


async def kept(http: Connections) -> None:
    """Until a connection is kept."""
    async with asyncio.timeout(60):
        while not any(http._idle.values()):
            await asyncio.sleep(0)


async def test_the_connection_of_an_answer_that_ends_after_its_last_event_is_kept() -> None:
    host = KeepingHost()
    async with host.listening() as port, Connections(Tokens("t")) as http:
        await ask(http, port)
        assert not any(http._idle.values())
        host.end.set()
        await kept(http)
        for _ in range(3):
            await ask(http, port)
            await kept(http)
    assert host.accepted == 1


async def test_a_kept_connection_that_the_host_has_closed_is_replaced() -> None:
    host = KeepingHost(each=1)
    host.end.set()
    async with host.listening() as port, Connections(Tokens("t")) as http:
        for _ in range(3):
            assert (await ask(http, port)).finish_reason == "stop"
    assert host.accepted == 3


async def test_a_new_connection_that_the_host_closes_is_an_error() -> None:
    host = KeepingHost(each=0)
    async with host.listening() as port, Connections(Tokens("t")) as http:
        with pytest.raises(ServerUnavailable, match="lost the connection to d"):
            await ask(http, port)
    assert host.accepted == 1


async def test_a_connection_with_bytes_behind_its_response_is_not_used_again() -> None:
    host = KeepingHost(behind=b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    host.end.set()
    async with host.listening() as port, Connections(Tokens("t")) as http:
        for _ in range(3):
            assert (await ask(http, port)).finish_reason == "stop"
            await kept(http)
    assert host.accepted == 3


async def test_a_connection_that_was_proven_with_an_earlier_token_is_not_shown_the_new_one(tmp_path: Path) -> None:
    host, path = KeepingHost(), tmp_path / "token"
    host.end.set()
    path.write_text(OLD)
    path.chmod(0o600)
    async with host.listening(OLD, NEW) as port, Connections(Tokens(path=path)) as http:
        for token, accepted in ((OLD, 1), (OLD, 1), (f"{NEW}\n{OLD}", 2)):
            path.write_text(token)
            await ask(http, port)
            await kept(http)
            assert host.accepted == accepted
    assert [head.count(f"Bearer {OLD}".encode()) for head in host.heads] == [1, 1, 0]


class Dripping(Server):
    """Sends a piece of a handshake again and again, which is never complete."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x16\x03\x03\x40\x00")
        while True:
            writer.write(b"\0")
            await writer.drain()
            await asyncio.sleep(0.01)


async def test_a_handshake_has_a_limit_even_if_the_host_keeps_sending() -> None:
    async with Dripping().listening(tls=False) as port, Connections(Tokens("t")) as http:
        async with asyncio.timeout(60):
            with pytest.raises(ServerSilent):
                await calls.get(http, described_host("d", port), "/load", timeout=0.3)


async def test_a_connection_on_which_a_request_cannot_be_sent_is_dropped() -> None:
    host = KeepingHost()
    async with host.listening() as port, Connections(Tokens("t")) as http:
        with pytest.raises(h11.LocalProtocolError):
            await http.send(HostRequest(described_host("d", port), "GET", "/load", id="a\nb"), 20)
        assert not http._busy
