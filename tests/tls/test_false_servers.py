"""What a program learns that has taken a server's port, or that listens on the way: all that a caller has sent it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from disagg.api.events import DoneEvent, ProgressEvent
from disagg.errors import DisaggError, ServerUnproven
from disagg.fleet.lifecycle.status.http_get import get
from disagg.inference.http import host_calls
from disagg.inference.http.connections import Connections
from disagg.token import Tokens
from tests.inference.scripted import Server, described_host

TOKEN = "the-token-of-this-fleet"
PROMPT = "a-prompt-that-nobody-else-may-read"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
MAX_HELLO = 4096
Ask = Callable[[int], Awaitable[object]]


class Recorder(Server):
    """Records what callers send. behind: the port of a server that it passes all bytes to; 0: it answers by itself."""

    def __init__(self, behind: int, answer: bytes = b"") -> None:
        super().__init__()
        self.behind, self.answer = behind, answer
        self.recorded = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.behind:
            await self._relay(reader, writer)
            return
        while data := await reader.read(65536):
            self.recorded += data
            writer.write(self.answer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", self.behind)

        async def answers() -> None:
            while data := await server.read(65536):
                writer.write(data)
            writer.close()

        answering = asyncio.ensure_future(answers())
        try:
            while data := await reader.read(65536):
                self.recorded += data
                to_server.write(data)
        finally:
            to_server.close()
            answering.cancel()
            await asyncio.wait((answering,))


class Answering(Server):
    """Answers one request. received: what it was sent, without TLS."""

    received = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received += await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await writer.drain()


async def generate(port: int) -> object:
    async with Connections(Tokens(TOKEN)) as http:
        body = ProgressEvent(phase=PROMPT, beats=0)
        call = host_calls.EventCall(described_host("d", port), "/generate", body, "r")
        return await host_calls.closing_event(http, call, DoneEvent)


async def load(port: int) -> object:
    async with Connections(Tokens(TOKEN)) as http:
        return await host_calls.get(http, described_host("d", port), "/load", timeout=60)


async def status(port: int) -> object:
    return await asyncio.to_thread(get, "127.0.0.1", port, "/health", TOKEN, 60.0)


def require_no_secret(recorded: bytes) -> None:
    assert recorded and TOKEN.encode() not in recorded and PROMPT.encode() not in recorded


@pytest.mark.parametrize("ask", [generate, load, status])
async def test_a_program_without_tls_is_sent_the_first_message_of_a_handshake(ask: Ask) -> None:
    false = Recorder(0, ANSWER)
    async with false.listening(tls=False) as port:
        with pytest.raises((ServerUnproven, ssl.SSLError)):
            await ask(port)
    require_no_secret(false.recorded)
    assert len(false.recorded) < MAX_HELLO


@pytest.mark.parametrize("ask", [generate, load, status])
async def test_a_server_with_another_token_is_sent_no_request(ask: Ask) -> None:
    other = Answering()
    async with other.listening("the-token-of-another-fleet") as behind:
        false = Recorder(behind)
        async with false.listening(tls=False) as port:
            with pytest.raises((ServerUnproven, ssl.SSLCertVerificationError)):
                await ask(port)
    require_no_secret(false.recorded)
    assert not other.received


@pytest.mark.parametrize("ask", [generate, load, status])
async def test_a_relay_to_a_real_server_reads_neither_token_nor_prompt(ask: Ask) -> None:
    real = Answering()
    async with real.listening(TOKEN) as behind:
        relay = Recorder(behind)
        async with relay.listening(tls=False) as port:
            with suppress(DisaggError):  # its answer to /generate is none
                await ask(port)
    require_no_secret(relay.recorded)
    assert f"Bearer {TOKEN}".encode() in real.received


async def test_a_caller_without_a_token_shows_none() -> None:
    """It may ask any server whether it is up."""
    real = Answering()
    async with real.listening(TOKEN) as port:
        answer = await asyncio.to_thread(get, "127.0.0.1", port, "/health", None, 60.0)
    assert answer == (200, {}) and b"Authorization" not in real.received
