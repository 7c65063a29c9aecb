"""Changes are posted or given to a command, with bounded attempts; what cannot be delivered is reported."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from disagg.api.watch import HostChange
from disagg.errors import FleetError
from disagg.fleet.lifecycle.watch.notify import MAX_WAITING, LineRunner, Notifier, Poster, PostPolicy, is_retryable
from tests.deadlines import LONG_S
from tests.fleet.facts.fixture_facts import fleet
from tests.fleet.farm import wait_until

CHANGE = HostChange("lab", "mac", "down", "failed", 1.0, why="no memory")
URL = "https://alerts.example/secret-path"
Answer = Callable[[httpx.Request], httpx.Response]


def poster(*answers: int | Exception) -> tuple[Poster, list[httpx.Request], list[float]]:
    """One that gets these answers in turn; its requests, and how long it waited before each."""
    requests: list[httpx.Request] = []
    waits: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        given = answers[len(requests) - 1]
        if isinstance(given, Exception):
            raise given
        return httpx.Response(given)

    return Poster(URL, sleep=waits.append, transport=httpx.MockTransport(answer)), requests, waits


def test_a_change_is_posted_as_json() -> None:
    post, requests, _ = poster(204)
    post(CHANGE)
    (request,) = requests
    assert (request.method, str(request.url)) == ("POST", URL)
    assert request.headers["content-type"] == "application/json"
    assert HostChange.from_json(json.loads(request.content)) == CHANGE


@pytest.mark.parametrize(
    ("code", "again"), [(500, True), (503, True), (429, True), (404, False), (401, False), (301, False)]
)
def test_only_what_may_be_answered_otherwise_is_tried_again(code: int, again: bool) -> None:
    assert is_retryable(code) == again
    post, requests, waits = poster(code, 200)
    if again:
        post(CHANGE)
        assert waits == [0.0, 1.0]
    else:
        with pytest.raises(FleetError, match=f"HTTP {code}"):
            post(CHANGE)
    assert len(requests) == 1 + again


def test_attempts_are_bounded_and_the_error_does_not_show_the_path_of_the_url() -> None:
    post, requests, waits = poster(httpx.ConnectError("no route"), 500, httpx.ReadTimeout("late"), 502)
    with pytest.raises(FleetError) as failed:
        post(CHANGE)
    assert len(requests) == 4 and waits == [0.0, 1.0, 4.0, 16.0]
    assert failed.value.message == "alerts.example did not take the change of mac: HTTP 502"


def test_a_command_gets_the_change_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lab = replace(fleet(), path=tmp_path / "hosts.toml")
    LineRunner(lab, 'echo "$DISAGG_HOST $DISAGG_CHANGE $DISAGG_STATE $DISAGG_ERROR" >noted')(CHANGE)
    assert (tmp_path / "noted").read_text() == "mac down failed no memory\n"
    with pytest.raises(FleetError, match="the command for mac failed: exit code 3"):
        LineRunner(lab, "exit 3")(CHANGE)


def test_one_way_that_fails_is_reported_and_the_other_goes_on() -> None:
    delivered, reported, done = list[str](), list[str](), threading.Event()

    def fails(change: HostChange) -> None:
        raise FleetError(f"no way for {change.host}")

    def works(change: HostChange) -> None:
        delivered.append(change.host)
        if len(delivered) == 2:
            done.set()

    with Notifier([fails, works], reported.append) as notifier:
        notifier.send(CHANGE)
        notifier.send(replace_host("spark"))
        assert done.wait(LONG_S)
    assert delivered == ["mac", "spark"] and reported == ["no way for mac", "no way for spark"]


def replace_host(name: str) -> HostChange:
    return HostChange("lab", name, "down", "failed", 1.0)


def test_changes_beyond_the_queue_are_left_out_with_a_word_and_watching_does_not_wait() -> None:
    begun, go_on, reported = threading.Event(), threading.Event(), list[str]()

    def slow(change: HostChange) -> None:
        begun.set()
        assert go_on.wait(LONG_S)

    with Notifier([slow], reported.append) as notifier:
        notifier.send(CHANGE)
        assert begun.wait(LONG_S)
        for _ in range(MAX_WAITING + 1):
            notifier.send(CHANGE)
        assert reported == [f"{MAX_WAITING} changes wait for their delivery: that of mac is left out"]
        go_on.set()


def test_without_a_way_nothing_waits() -> None:
    reported: list[str] = []
    with Notifier([], reported.append) as notifier:
        for _ in range(MAX_WAITING + 1):
            notifier.send(CHANGE)
    assert reported == []


def test_after_an_unexpected_error_later_changes_are_delivered() -> None:
    delivered, reported, done = list[str](), list[str](), threading.Event()

    def deliver(change: HostChange) -> None:
        if change.host == "mac":
            raise httpx.InvalidURL("https://alerts.example/secret")
        delivered.append(change.host)
        done.set()

    with Notifier([deliver], reported.append) as notifier:
        notifier.send(CHANGE)
        notifier.send(replace_host("spark"))
        assert done.wait(LONG_S)
    assert delivered == ["spark"] and reported == ["the change of mac was not delivered: InvalidURL"]


def test_the_end_of_the_watch_ends_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    runner = LineRunner(replace(fleet(), path=tmp_path / "hosts.toml"), "echo $$ >new; mv new pid; exec sleep 1000")
    reported: list[str] = []
    with Notifier([runner], reported.append) as notifier:
        notifier.send(CHANGE)
        wait_until((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid))
    assert reported == []


def test_the_end_of_the_watch_ends_the_pause_before_another_attempt() -> None:
    attempted = threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        attempted.set()
        return httpx.Response(500)

    post = Poster(URL, PostPolicy(pauses_s=(10 * LONG_S,)), transport=httpx.MockTransport(answer))
    with Notifier([post], lambda why: None) as notifier:
        notifier.send(CHANGE)
        assert attempted.wait(LONG_S)
    wait_until(lambda: not notifier._thread.is_alive())


class Endless(httpx.AsyncByteStream):
    """The body of an answer that never ends."""

    closed = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.parametrize("code", [200, 404])
def test_the_body_of_an_answer_is_not_read(code: int) -> None:
    body = Endless()
    transport = httpx.MockTransport(lambda request: httpx.Response(code, stream=body))
    post = Poster(URL, sleep=lambda seconds: None, transport=transport)
    if code == 200:
        post(CHANGE)
    else:
        with pytest.raises(FleetError, match="HTTP 404"):
            post(CHANGE)
    assert body.closed


@contextmanager
def receiver(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that takes one connection, reads from it once, and leaves the rest to `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # the caller has closed it
                connection.recv(1 << 16)
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/secret-path"
        thread.join(LONG_S)


def test_a_receiver_that_sends_its_head_byte_by_byte_is_given_up_in_time() -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nX:")
        for _ in range(1000):
            connection.sendall(b" ")
            time.sleep(0.05)

    began = time.monotonic()
    with receiver(drip) as url, pytest.raises(FleetError) as failed:
        Poster(url, PostPolicy(0.5, ()))(CHANGE)
    assert failed.value.message == "127.0.0.1 did not take the change of mac: no answer within 0.5 s"
    assert time.monotonic() - began < 25


def test_a_change_arrives_over_a_real_connection() -> None:
    with receiver(lambda connection: connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")) as url:
        Poster(url, PostPolicy(LONG_S, ()))(CHANGE)
