from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disagg.fleet.lifecycle.status.http_get import ReplyTimeout, get
from tests.secure import accept


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Takes one connection, reads a request, and leaves the rest to `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with accept(listener, "a-token") as connection:
                connection.recv(65536)
                try:
                    answer(connection)
                except OSError:  # the client has had enough
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(30)


def sends(body: bytes, code: int = 200) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(
        b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n%s" % (code, len(body), body)
    )


def ask(port: int, timeout_s: float = 5.0) -> Any:
    return get("127.0.0.1", port, "/health", "a-token", timeout_s)


def test_an_object_comes_with_its_code() -> None:
    with server(sends(b'{"a": 1}', 401)) as port:
        assert ask(port) == (401, {"a": 1})


@pytest.mark.parametrize("body", [b"hello", b"[1]", b'{"a": 1', b'"' + b"x" * (2 << 20) + b'"'])
def test_anything_but_an_object_of_a_mib_is_none(body: bytes) -> None:
    with server(sends(body)) as port:
        assert ask(port) == (200, None)


def test_a_server_that_says_nothing_is_mute_in_time() -> None:
    def never_answers(connection: socket.socket) -> None:
        connection.settimeout(5)
        connection.recv(1)

    with server(never_answers) as port, pytest.raises(ReplyTimeout):
        ask(port, 0.3)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"HTTP/1.1 200 OK\r\nX:"])
def test_a_server_that_drips_is_mute_in_time(head: bytes) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(1000):  # until the client has closed it
            connection.sendall(b" ")
            time.sleep(0.05)

    began = time.monotonic()
    with server(drip) as port, pytest.raises(ReplyTimeout):
        ask(port, 0.5)
    assert time.monotonic() - began < 25


def test_what_is_no_http_is_told_from_a_broken_connection() -> None:
    with (
        server(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n")) as port,
        pytest.raises(http.client.HTTPException),
    ):
        ask(port)
    with pytest.raises(ConnectionRefusedError):
        ask(port)
