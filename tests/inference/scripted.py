"""Hosts whose answers are scripts of a test, on the test's own event loop.

With the fixture `virtual_time` their waits and the client's timers take no time, whatever the machine's load is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from disagg.api.events import DoneEvent, ErrorEvent, Event, ProgressEvent, SlotEvent, Timing, TokenLogprob, TokensEvent
from disagg.api.keeper import LoadEvent
from disagg.api.names import Role
from disagg.api.requests import KVAddress
from disagg.api.status import CountAnswer, LeaseAnswer, Load
from disagg.config import EngineOptions, Fleet, Host, Model
from disagg.errors import DisaggError
from disagg.inference.client import AsyncClient
from disagg.inference.http.connections import Connections
from disagg.inference.policy import DEFAULT_POLICY, RetryPolicy
from disagg.token import Tokens
from tests import secure

Body = dict[str, Any]
Script = Callable[[Body], AsyncGenerator[Any, None]]
"""Yields the events of one answer, or bytes that are none; or one answer that is no stream. A DisaggError before any
event is the status of the answer, later its last event."""

PROGRESS_S = 1.0


async def silent(_: Body) -> AsyncGenerator[Event | DisaggError, None]:
    """Accept the request and send nothing."""
    await asyncio.Event().wait()
    yield progress("queued")


def progress(phase: str, beats: int = 0) -> ProgressEvent:
    return ProgressEvent(phase=phase, beats=beats)


async def waiting(phase: str, beats: int = 0, seconds: float = 1e9) -> AsyncGenerator[ProgressEvent, None]:
    """A progress event a second for so long, from a host whose engine finishes nothing."""
    for _ in range(int(seconds / PROGRESS_S)):
        await asyncio.sleep(PROGRESS_S)
        yield progress(phase, beats)


async def queued(_: Body) -> AsyncGenerator[Event | DisaggError, None]:
    """State for ever that the request waits; the engine does nothing."""
    async for event in waiting("queued"):
        yield event


async def stuck(_: Body) -> AsyncGenerator[Event | DisaggError, None]:
    """State for ever that the request is computed; the engine does nothing."""
    async for event in waiting("generating", beats=7):
        yield event


def slot(body: Body) -> SlotEvent:
    return SlotEvent(request_id="r", ticket="a ticket", kv=KVAddress("127.0.0.1", 9), prompt_tokens=len(body["tokens"]))


def tokens(*ids: int) -> TokensEvent:
    return TokensEvent("x" * len(ids), tuple(TokenLogprob(one, 0.0) for one in ids))


def done(body: Body, computed: int = 1) -> DoneEvent:
    count = body["sampling"]["max_tokens"]
    return DoneEvent(
        finish_reason="length",
        prompt_tokens=len(body["tokens"]),
        completion_tokens=count,
        computed_prompt_tokens=computed,
        timing=Timing(),
    )


async def whole(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
    """The rest of the answer 0, 1, 2, ... of max_tokens tokens, computed by this host alone."""
    for token in range(len(body.get("answer_tokens", ())), body["sampling"]["max_tokens"]):
        yield tokens(token)
    yield done(body, len(body["tokens"]))


class Server:
    """A server on the test's event loop; `close` leaves no task and no socket behind."""

    def __init__(self) -> None:
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it is closed."""
        raise NotImplementedError

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(task := asyncio.ensure_future(self._run(reader, writer)))
        task.add_done_callback(self._connections.discard)

    def end_connections(self) -> None:
        """Break off all connections, as the end of the process does."""
        for task in self._connections:
            task.cancel()

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            try:
                await self.serve(reader, writer)
                writer.close()
                await writer.wait_closed()
            finally:
                writer.transport.abort()

    @asynccontextmanager
    async def listening(self, *tokens: str, tls: bool = True, port: int = 0) -> AsyncIterator[int]:
        """Its port, any if it is 0. tls: with these tokens; a whole-request host has none."""
        context = secure.context(*tokens) if tls else None
        server = await asyncio.start_server(self.accept, "127.0.0.1", port, ssl=context)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            tasks = [*self._connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # the sockets are closed by then


class ScriptedHost(Server):
    """One host. asked: the body of each request, by path, in order. load_s: how long GET /load takes. loaded: is called
    when it has been answered."""

    def __init__(self, scripts: Mapping[str, Script], load: Load) -> None:
        super().__init__()
        self.scripts = {f"/{path}": script for path, script in scripts.items()}
        self.load = load
        self.asked: list[tuple[str, Body]] = []
        self.load_s = 0.0
        self.loaded: Callable[[], object] = bool

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As many requests as come on the connection, until an event stream, which ends it."""
        while head := await reader.readuntil(b"\r\n\r\n"):
            path = head.split(b" ", 2)[1].decode()
            body = await reader.readexactly(_content_length(head))
            if path not in self.scripts:
                await self._answer_at_once(path, writer)
                continue
            self.asked.append((path, json.loads(body or b"{}")))
            await self._answer(self.scripts[path](self.asked[-1][1]), writer)
            break

    async def _answer_at_once(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path != "/load":
            writer.write(_response(200, LeaseAnswer().to_bytes()))
            return
        await asyncio.sleep(self.load_s)
        writer.write(_response(200, self.load.to_bytes()))
        self.loaded()

    async def _answer(self, events: AsyncGenerator[Any, None], writer: asyncio.StreamWriter) -> None:
        started = False
        async with aclosing(events):
            async for event in events:
                if isinstance(event, DisaggError) and not started:
                    writer.write(_response(event.http_status, json.dumps({"error": event.to_json()}).encode()))
                    return
                if isinstance(event, CountAnswer):
                    writer.write(_response(200, event.to_bytes()))
                    return
                if not started:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
                    started = True
                sent = ErrorEvent.of(event) if isinstance(event, DisaggError) else event
                writer.write(sent if isinstance(sent, bytes) else _encoded(sent))
                await writer.drain()


def _encoded(event: Event | ErrorEvent | LoadEvent) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.event.encode(), event.to_bytes())


def _content_length(head: bytes) -> int:
    lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
    return next((int(value) for name, _, value in lines if name == b"content-length"), 0)


def _response(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


def described_host(name: str, port: int) -> Host:
    role: Role = "prefill" if name.startswith("p") else "decode"
    kv_port = 9 if role == "decode" else None
    return Host(name, "127.0.0.1", (role,), "m", EngineOptions("simulated"), port, kv_port=kv_port)


@asynccontextmanager
async def scripted(**hosts: Mapping[str, Script]) -> AsyncIterator[tuple[Fleet, dict[str, ScriptedHost]]]:
    """A fleet of one model `m` whose hosts answer each path by its script: `d1={"decode": ...}` is a decode host, and
    names that begin with p are prefill hosts."""
    scripts = {name: ScriptedHost(paths, Load("ok", boot_id=name)) for name, paths in hosts.items()}
    async with AsyncExitStack() as stack:
        described = {
            name: described_host(name, await stack.enter_async_context(host.listening()))
            for name, host in scripts.items()
        }
        yield Fleet("scripted", Path("hosts.toml"), {"m": Model("m", {}, 4096)}, described), scripts


@asynccontextmanager
async def client_of(
    policy: RetryPolicy = DEFAULT_POLICY,
    **hosts: Mapping[str, Script],
) -> AsyncIterator[tuple[AsyncClient, dict[str, ScriptedHost]]]:
    """A client of such a fleet, which begins with the first host."""
    async with scripted(**hosts) as (fleet, scripts), AsyncClient(fleet, token="t", policy=policy, start=0) as client:
        yield client, scripts


class FixedHost(Server):
    """Answers everything with the same bytes. received: the requests."""

    def __init__(self, response: bytes) -> None:
        super().__init__()
        self.response = response
        self.received: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.received.append(head + await reader.readexactly(_content_length(head)))
        writer.write(self.response)


@asynccontextmanager
async def answering(*parts: bytes, status: int = 200) -> AsyncIterator[tuple[Connections, Host, list[bytes]]]:
    """A client, and a host that answers everything with these bytes. The list: what it has received, by request."""
    host = FixedHost(b"HTTP/1.1 %d X\r\n\r\n%b" % (status, b"".join(parts)))
    async with host.listening() as port, Connections(Tokens("token")) as http:
        yield http, described_host("d", port), host.received
