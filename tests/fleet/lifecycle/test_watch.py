"""Which changes readings of the fleet's health show, and their delivery to a command or a URL."""

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

from disagg.api.host_change import HostChange
from disagg.errors import FleetError
from disagg.fleet.lifecycle.status.host_status import HealthState, HostStatus
from disagg.fleet.lifecycle.watch import (
    MAX_WAITING,
    FleetWatch,
    LineRunner,
    Notifier,
    Poster,
    PostPolicy,
    explained,
    is_retryable,
)
from tests.deadlines import LONG_S, wait_until
from tests.fleet.facts.fixture_facts import fleet


def status(host: str, state: HealthState) -> HostStatus:
    why, hint = ("", "") if state == "healthy" else ("nothing listens", "disagg start")
    return HostStatus(host, ("decode",), "qwen", "https://x", state, why, hint)


def changes(letters: str, misses: int = 2) -> list[tuple[int, str, float | None]]:
    """(reading, change, seconds) of one host that is read every 10 s from 1000 on."""
    watch = FleetWatch("lab", misses)
    found: list[tuple[int, str, float | None]] = []
    for index, letter in enumerate(letters):
        one = [status("mac", "healthy" if letter == "u" else "not running")]
        found += [(index, change.change, change.seconds) for change in watch.update(one, 1000.0 + 10 * index)]
    return found


@pytest.mark.parametrize(
    ("letters", "found"),
    [
        ("uuuu", []),
        ("uudu", []),
        ("ududud", []),
        ("uudd", [(3, "down", None)]),
        ("uudddd", [(3, "down", None)]),
        ("uuddu", [(3, "down", None), (4, "up", 20.0)]),
        ("ddu", [(1, "down", None), (2, "up", 20.0)]),
        ("du", []),
        ("udduudd", [(2, "down", None), (3, "up", 20.0), (6, "down", 30.0)]),
        ("udduduudd", [(2, "down", None), (3, "up", 20.0), (8, "down", 50.0)]),
    ],
)
def test_two_misses_are_down_and_one_healthy_reading_is_up(
    letters: str, found: list[tuple[int, str, float | None]]
) -> None:
    assert changes(letters) == found


def test_the_number_of_misses_can_be_chosen() -> None:
    assert changes("ud", misses=1) == [(1, "down", None)]
    assert changes("uddud", misses=3) == []


def test_hosts_are_counted_each_for_itself() -> None:
    watch = FleetWatch("lab")
    assert watch.update([status("a", "healthy"), status("b", "healthy")], 0.0) == []
    assert watch.update([status("a", "unreachable"), status("b", "healthy")], 1.0) == []
    (change,) = watch.update([status("a", "unreachable"), status("b", "loading")], 2.0)
    assert change == HostChange(
        "lab", "a", "down", "unreachable", 2.0, ("decode",), "qwen", "nothing listens", "disagg start"
    )


@pytest.mark.parametrize(
    "state",
    ["loading", "silent", "stalled", "draining", "failed", "unauthorised", "foreign", "not running", "unreachable"],
)
def test_whatever_is_not_healthy_is_a_miss(state: HealthState) -> None:
    watch = FleetWatch("lab", 1)
    assert [change.state for change in watch.update([status("a", state)], 0.0)] == [state]


def test_a_clock_that_was_set_back_gives_no_negative_time() -> None:
    watch = FleetWatch("lab", 1)
    watch.update([status("a", "failed")], 1000.0)
    (up,) = watch.update([status("a", "healthy")], 10.0)
    assert up.seconds == 0.0


def test_the_machines_reason_replaces_that_of_the_network() -> None:
    change = HostChange("lab", "a", "down", "not running", 2.0, why="nothing listens")
    found = explained(change, status("a", "failed"))
    assert (found.state, found.hint, found.time) == ("failed", "disagg start", 2.0)
    assert explained(change, None) == change


def test_a_change_is_read_as_it_was_written() -> None:
    change = HostChange("lab", "a", "up", "healthy", 2.5, ("decode",), "qwen", seconds=3.0)
    assert HostChange.from_bytes(change.to_bytes()) == change


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
