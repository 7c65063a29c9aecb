"""Connections are kept between requests, and replaced if the host has closed them."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from httptools import HttpParserError

from disagg.api.events import DoneEvent, ProgressEvent
from disagg.config import EngineOptions, Host
from disagg.errors import RequestError, ServerSilent, ServerUnavailable
from disagg.inference.http import connections, host_calls
from disagg.inference.http.connection import HostConnection
from disagg.inference.http.connections import Connections, HostRequest
from disagg.token import Tokens
from tests.inference.scripted import Server, described_host

DONE = (
    b'event: done\ndata: {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1, '
    b'"computed_prompt_tokens": 1, "timing": {}}\n\n'
)
PATIENCE_S = 60.0
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
    call = host_calls.EventCall(described_host("d", port), "/generate", ProgressEvent(phase="", beats=0), "r")
    return await host_calls.closing_event(http, call, DoneEvent)


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
                await host_calls.get(http, described_host("d", port), "/load", timeout=0.3)


async def test_a_connection_on_which_a_request_cannot_be_sent_is_dropped() -> None:
    host = KeepingHost()
    async with host.listening() as port, Connections(Tokens("t")) as http:
        with pytest.raises(RequestError, match="X-Request-Id"):
            await http.send(HostRequest(described_host("d", port), "GET", "/load", id="a\nb"), 20)
        assert not http._busy


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until the test ends, the machine looks names up and finds none. Set while it does."""
    asked, over = threading.Event(), threading.Event()

    def getaddrinfo(*_: object, **__: object) -> NoReturn:
        asked.set()
        over.wait(PATIENCE_S)
        raise OSError("no such name")

    monkeypatch.setattr(connections, "socket", SimpleNamespace(getaddrinfo=getaddrinfo, SOCK_STREAM=socket.SOCK_STREAM))
    before = set(threading.enumerate())
    yield asked
    over.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port at which connections are made, and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def host_that_opens_slowly(what: str, port: int) -> Host:
    host = described_host("d", port)
    if what == "a name that is not found":
        return replace(host, address="a-host-of-the-fleet")
    if what == "TLS of others":
        return replace(host, roles=("whole",), engine=EngineOptions("openai", url=f"https://127.0.0.1:{port}/v1"))
    return host


@pytest.mark.parametrize("what", ["a name that is not found", "TLS", "TLS of others"])
async def test_closing_ends_a_connection_that_is_being_opened(
    what: str, silent_port: int, no_names: threading.Event
) -> None:
    http = Connections(Tokens("t"))
    request = HostRequest(host_that_opens_slowly(what, silent_port), "GET", "/load")
    sending = asyncio.ensure_future(http.send(request, 10 * PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        while not http._opening:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # so that it has sent something
        await http.aclose()
        with pytest.raises(RequestError, match="this client is closed"):
            await sending
    assert not http._opening


@contextmanager
def just_opened(http: Connections, then: Callable[[], object]) -> Iterator[list[HostConnection]]:
    """The connections that are opened. `then` is called for each before the request that waits for it goes on."""
    ours, opened = http._opener.ours, list[HostConnection]()

    async def open_one(*call: Any) -> HostConnection:
        opened.append(await ours(*call))
        asyncio.get_running_loop().call_soon(then)
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http._opener, "ours", open_one)
        yield opened


async def test_a_connection_that_opens_while_the_client_closes_carries_no_request() -> None:
    host = KeepingHost()
    async with host.listening() as port, Connections(Tokens("t")) as http:
        with just_opened(http, http.closed.set) as opened, pytest.raises(RequestError, match="this client is closed"):
            await http.send(HostRequest(described_host("d", port), "GET", "/load"), PATIENCE_S)
        assert not opened[0].usable and not http._busy
    assert not host.heads


async def test_a_request_that_is_cancelled_while_its_connection_opens_leaves_none_behind() -> None:
    host = KeepingHost()
    async with host.listening() as port, Connections(Tokens("t")) as http:
        sending = asyncio.ensure_future(http.send(HostRequest(described_host("d", port), "GET", "/load"), PATIENCE_S))
        with just_opened(http, sending.cancel) as opened, pytest.raises(asyncio.CancelledError):
            await sending
        await asyncio.sleep(0)
        assert not opened[0].usable and not http._opening and not http._busy
    assert not host.heads


async def test_a_name_is_looked_up_once_at_a_time(no_names: threading.Event) -> None:
    host = replace(described_host("d", 9), address="a-host-of-the-fleet")
    async with Connections(Tokens("t")) as http:
        sending = [asyncio.ensure_future(http.send(HostRequest(host, "GET", "/load"), 0.05)) for _ in range(5)]
        for one in sending:
            with pytest.raises(ServerUnavailable, match="no server answers"):
                await one
        lookups = [thread for thread in threading.enumerate() if thread.name == "look up a-host-of-the-fleet"]
        assert len(lookups) == 1


async def test_a_connection_that_is_closed_is_freed_without_the_garbage_collector() -> None:
    """It has buffers of TLS, of which the collector does not know."""
    host = KeepingHost()
    gc.collect()
    gc.disable()
    try:
        async with host.listening() as port, Connections(Tokens("t")) as http:
            sent = await http.send(HostRequest(described_host("d", port), "GET", "/load"), PATIENCE_S)
            closed = weakref.ref(sent.connection)
            sent.connection.close()
            http.release(sent)
            del sent
            async with asyncio.timeout(PATIENCE_S):
                while closed() is not None:
                    await asyncio.sleep(0.001)
    finally:
        gc.enable()


async def test_a_connection_that_failed_is_freed_without_the_garbage_collector() -> None:
    """The error that it raised refers to it by its traceback."""
    host = KeepingHost(each=0)
    gc.collect()
    gc.disable()
    try:
        async with host.listening() as port, Connections(Tokens("t")) as http:
            sent = await http.send(HostRequest(described_host("d", port), "GET", "/load"), PATIENCE_S)
            failed = weakref.ref(sent.connection)
            with pytest.raises((OSError, HttpParserError)):
                await http.head(sent, PATIENCE_S, PATIENCE_S)
            http.release(sent)
            del sent
            async with asyncio.timeout(PATIENCE_S):
                while failed() is not None:
                    await asyncio.sleep(0.001)
    finally:
        gc.enable()
