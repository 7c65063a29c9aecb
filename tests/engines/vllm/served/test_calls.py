"""disagg/engines/vllm/served/calls.py: a request to `vllm serve` ends once, however it ends."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disagg.engines.vllm.served.calls import Call, VLLMServer
from disagg.errors import Cancelled, ConfigError, DeadlineExceeded, DisaggError, ModelError, RequestError
from tests.engines.vllm.served.fake_serve import serving
from tests.kv.kv_parts import PATIENCE_S
from tests.ports import free_ports

Ends = queue.Queue[bytes | DisaggError]


def call(url: str, ends: Ends, deadline_s: float = PATIENCE_S) -> Call:
    return Call(VLLMServer(url), "/v1/completions", b"{}", deadline=time.monotonic() + deadline_s, on_end=ends.put)


def test_an_answer_is_given_as_it_is() -> None:
    ends: Ends = queue.Queue()
    with serving(lambda body: (200, b"content")) as fake:
        call(fake.url, ends)
        assert ends.get(timeout=PATIENCE_S) == b"content"


def test_the_lines_of_a_streamed_answer_are_given_one_by_one() -> None:
    ends: Ends = queue.Queue()
    lines: list[bytes] = []
    with serving(lambda body: (200, b"data: 1\n\ndata: 2\n\n")) as fake:
        deadline = time.monotonic() + PATIENCE_S
        Call(VLLMServer(fake.url), "/v1/completions", b"{}", deadline=deadline, on_end=ends.put, on_line=lines.append)
        assert ends.get(timeout=PATIENCE_S) == b""
    assert [line for line in lines if line.strip()] == [b"data: 1\n", b"data: 2\n"]


@pytest.mark.parametrize(("status", "lives"), [(200, True), (401, True), (404, True), (500, False), (503, False)])
def test_a_server_lives_whatever_it_answers_but_an_error_of_its_own(status: int, lives: bool) -> None:
    with serving(lambda body: (200, b"")) as fake:
        fake.healthy = status
        if lives:
            VLLMServer(fake.url).lives("/health", PATIENCE_S)
        else:
            with pytest.raises(ModelError):
                VLLMServer(fake.url).lives("/health", PATIENCE_S)


@contextmanager
def raw(answer: bytes) -> Iterator[str]:
    """The URL of a server that gives one request this answer, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, sock.makefile("rb") as received:
                while received.readline().strip():
                    pass
                received.read(len(b"{}"))
                sock.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE_S)


CHUNKS = b"4\r\na\nb\n\r\n2\r\nc\n\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        b"HTTP/1.0 200 OK\r\n\r\na\nb\nc\n",
    ],
    ids=["chunks", "no length"],
)
def test_a_streamed_answer_after_which_the_server_closes_is_read_to_its_end(answer: bytes) -> None:
    ends: Ends = queue.Queue()
    lines: list[bytes] = []
    with raw(answer) as url:
        deadline = time.monotonic() + PATIENCE_S
        Call(VLLMServer(url), "/v1/completions", b"{}", deadline=deadline, on_end=ends.put, on_line=lines.append)
        assert ends.get(timeout=PATIENCE_S) == b""
    assert lines == [b"a\n", b"b\n", b"c\n"]


def test_the_key_of_a_server_goes_where_it_asks_for_one_and_is_read_anew_for_each_request() -> None:
    ends: Ends = queue.Queue()
    keys = iter(["first", "second"])
    with serving(lambda body: (200, b"content")) as fake:
        server = VLLMServer(fake.url, lambda: next(keys))
        server.ask("GET", "/v1/models", None, PATIENCE_S)
        server.ask("GET", "/health", None, PATIENCE_S)
        Call(server, "/v1/completions", b"{}", deadline=time.monotonic() + PATIENCE_S, on_end=ends.put)
        assert ends.get(timeout=PATIENCE_S) == b"content"
    assert fake.keys == {"/v1/models": "Bearer first", "/health": None, "/v1/completions": "Bearer second"}


def test_a_key_that_cannot_be_read_is_the_end_of_its_request() -> None:
    ends: Ends = queue.Queue()
    with serving(lambda body: (200, b"content")) as fake:
        server = VLLMServer(fake.url, lambda: fail(ConfigError("no key")))
        Call(server, "/v1/completions", b"{}", deadline=time.monotonic() + PATIENCE_S, on_end=ends.put)
        assert isinstance(ends.get(timeout=PATIENCE_S), ConfigError)
        with pytest.raises(ConfigError):
            server.ask("GET", "/v1/models", None, PATIENCE_S)
    assert not fake.bodies


def fail(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("error", [RecursionError("deep"), TimeoutError("connecting"), AttributeError("a defect")])
def test_whatever_fails_in_a_request_before_its_deadline_is_its_servers_failure(error: Exception) -> None:
    ends: Ends = queue.Queue()
    deadline = time.monotonic() + PATIENCE_S
    server = VLLMServer("http://127.0.0.1:1")
    Call(server, "/", b"{}", deadline=deadline, on_end=ends.put, first=lambda: fail(error))
    assert type(ends.get(timeout=PATIENCE_S)) is ModelError


def test_what_is_raised_before_a_request_is_its_end() -> None:
    ends: Ends = queue.Queue()
    with serving(lambda body: (200, b"content")) as fake:
        first = RequestError("no")
        Call(VLLMServer(fake.url), "/", b"{}", deadline=0.0, on_end=ends.put, first=lambda: fail(first))
        assert ends.get(timeout=PATIENCE_S) is first
    assert not fake.bodies


@pytest.mark.parametrize(("status", "kind"), [(400, RequestError), (404, ModelError), (500, ModelError)])
def test_a_refusal_is_an_error(status: int, kind: type[DisaggError]) -> None:
    ends: Ends = queue.Queue()
    with serving(lambda body: (status, b"no")) as fake:
        call(fake.url, ends)
        assert type(ends.get(timeout=PATIENCE_S)) is kind


def test_a_request_that_is_closed_ends_at_once_and_its_server_sees_the_end() -> None:
    ends: Ends = queue.Queue()
    go_on = threading.Event()
    with serving(lambda body: (200, b"late") if go_on.wait(PATIENCE_S) else (500, b"")) as fake:
        one = call(fake.url, ends)
        assert fake.asked.wait(PATIENCE_S)
        one.close()
        assert isinstance(ends.get(timeout=PATIENCE_S), Cancelled)
        go_on.set()


def test_a_request_that_is_closed_before_it_is_sent_ends_too() -> None:
    ends: Ends = queue.Queue()
    with serving(lambda body: (200, b"content")) as fake:
        call(fake.url, ends).close()
        assert isinstance(ends.get(timeout=PATIENCE_S), Cancelled | bytes)
    assert ends.empty()


def test_a_server_that_answers_nothing_until_the_deadline_is_left() -> None:
    ends: Ends = queue.Queue()
    go_on = threading.Event()
    with serving(lambda body: (200, b"late") if go_on.wait(PATIENCE_S) else (500, b"")) as fake:
        call(fake.url, ends, deadline_s=0.1)
        assert isinstance(ends.get(timeout=PATIENCE_S), DeadlineExceeded)
        go_on.set()


def test_a_server_that_is_not_there_does_not_listen_and_ends_its_requests() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    ends: Ends = queue.Queue()
    call(url, ends)
    error = ends.get(timeout=PATIENCE_S)
    assert isinstance(error, ModelError) and url in error.message
    assert not VLLMServer(url).listens()
