"""What a connection makes of responses that are unusual, or meant to harm, on both event loops."""

from __future__ import annotations

import asyncio
import socket
import time
from unittest.mock import Mock

import pytest

from disagg.errors import ServerUnavailable
from disagg.inference.http import host_calls
from disagg.inference.http.connection import MAX_HEAD_BYTES, READ_BYTES, HostConnection
from disagg.inference.http.connections import Connections
from disagg.token import Tokens
from tests.inference.scripted import FixedHost, described_host
from tests.whole.fake_openai import whole_host

WAIT_S = 60.0
STOPPED_S = 0.8
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
LONG = b"x" * (2 * MAX_HEAD_BYTES)


async def load(response: bytes) -> object:
    async with FixedHost(response).listening() as port, Connections(Tokens("t")) as http:
        return await host_calls.get(http, described_host("d", port), "/load", timeout=WAIT_S)


@pytest.mark.parametrize(
    "endless",
    [
        OK + b"X: " + LONG,
        OK + b"X: y\r\n" * MAX_HEAD_BYTES,
        CHUNKED + b"2;" + LONG,
        CHUNKED + b"2\r\n{}\r\n0\r\nX: " + LONG,
    ],
    ids=["a header", "headers", "what a chunk states", "what follows the last chunk"],
)
async def test_what_is_no_body_has_a_bound(endless: bytes) -> None:
    async with asyncio.timeout(WAIT_S / 2):
        with pytest.raises(ServerUnavailable, match="bytes that are no body"):
            await load(endless)


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 103 Early Hints\r\nContent-Length: 9\r\n\r\n" + OK + b'Content-Length: 8\r\n\r\n{"a": 1}',
        CHUNKED + b'3\r\n{"a\r\n5\r\n": 1}\r\n0\r\n\r\n',
        OK + b'\r\n{"a": 1}',
        OK + b'content-LENGTH: 8\r\nConnection: close\r\n\r\n{"a": 1}',
    ],
    ids=["after another one", "in chunks", "until the connection ends", "with a length"],
)
async def test_a_response_may_come_in_each_of_these_ways(response: bytes) -> None:
    assert await load(response) == {"a": 1}


@pytest.mark.parametrize("cut", [b"", OK, OK + b'Content-Length: 9\r\n\r\n{"a": 1}', CHUNKED + b'8\r\n{"a": 1}\r\n'])
async def test_a_response_that_is_cut_off_is_no_answer(cut: bytes) -> None:
    with pytest.raises(ServerUnavailable, match="lost the connection to d: the host closed the connection"):
        await load(cut)


async def test_a_response_that_changes_the_protocol_is_an_error_of_the_host() -> None:
    with pytest.raises(ServerUnavailable, match="lost the connection to d: the host changes to another protocol"):
        await load(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")


def test_ctrl_c_while_a_piece_is_read_is_no_error_of_the_host() -> None:
    """As in a program that runs its event loop without asyncio.run, where it is raised wherever Python is."""
    buffer = memoryview(bytearray(READ_BYTES))
    connection = HostConnection(buffer)
    connection.connection_made(Mock(asyncio.Transport))
    connection.send("GET", "/load", (), b"")

    def interrupted(piece: bytes) -> bool:
        raise KeyboardInterrupt

    connection._take = interrupted
    response = OK + b"Content-Length: 2\r\n\r\n{}"
    buffer[: len(response)] = response
    with pytest.raises(KeyboardInterrupt):
        connection.buffer_updated(len(response))


async def test_what_has_arrived_when_a_wait_is_over_counts() -> None:
    """As in a process that was stopped for a while: one of the event loops looks at its timers before it reads."""
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, near, far:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                far.send(b".")  # the caller's event loop stands still, for longer than it waits for an answer
                time.sleep(STOPPED_S / 4)
                connection.sendall(OK + b"Content-Length: 2\r\n\r\n{}")

        def stand_still() -> None:
            near.recv(1)
            time.sleep(STOPPED_S)

        loop.add_reader(near, stand_still)
        answering = loop.run_in_executor(None, answer)
        async with Connections(Tokens("t")) as http:
            host = whole_host("m", listener.getsockname()[1])
            assert (await host_calls.get_whole(http, host, "/models", STOPPED_S / 2)).content == b"{}"
        await answering
        loop.remove_reader(near)
