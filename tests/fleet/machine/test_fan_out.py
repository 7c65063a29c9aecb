"""One action on many hosts: order, errors, deadlines, and what runs in the background."""

from __future__ import annotations

import threading

import pytest

from disagg.config import EngineOptions, Host
from disagg.errors import Cancelled, FleetError
from disagg.fleet.machine import interruption
from disagg.fleet.machine.fan_out import FanOutLimits, each, in_background, limited
from disagg.fleet.machine.ssh.settings import SHORTEST_S, SSHTimeouts
from tests.deadlines import LONG_S, wait_until

HOSTS = [
    Host(name, "127.0.0.1", ("prefill",), "tiny", EngineOptions("transformers"), 8000, connector="local")
    for name in ("a", "b", "c")
]


@pytest.mark.parametrize("parallel", [None, 1])
def test_a_host_that_hangs_is_left_behind_as_timed_out_and_the_others_are_asked(parallel: int | None) -> None:
    released = threading.Event()

    def action(host: Host) -> str:
        if host.name == "a":
            released.wait(LONG_S)  # cannot be interrupted, as a name look-up
        return host.name

    try:
        with limited(FanOutLimits(parallel)):
            a, b, c = each(HOSTS, action, timeout=0.9)
    finally:
        released.set()
    assert (b.value, c.value) == ("b", "c") and b.ok and c.ok
    assert a.timed_out and a.error is not None and a.error.message == "a: no answer within 0.9 s"


def test_a_timeout_interrupts_what_still_waits() -> None:
    interrupted: list[str] = []

    def action(host: Host) -> None:
        try:
            interruption.sleep(LONG_S)
        except Cancelled:
            interrupted.append(host.name)
            raise

    outcomes = each(HOSTS, action, timeout=0.9)
    assert all(outcome.timed_out for outcome in outcomes)
    wait_until(lambda: sorted(interrupted) == ["a", "b", "c"])


def test_with_a_timeout_all_hosts_start_at_once() -> None:
    together = threading.Barrier(3)
    outcomes = each(HOSTS, lambda host: together.wait(LONG_S), timeout=LONG_S)
    assert all(outcome.ok for outcome in outcomes)


def test_at_most_so_many_hosts_at_once_also_for_what_an_action_runs_itself() -> None:
    running, most, lock = set[str](), 0, threading.Lock()

    def action(host: Host) -> None:
        nonlocal most
        with lock:
            running.add(host.name)
            most = max(most, len(running))
        interruption.sleep(0.05)  # long enough for another one to begin, if it may
        with lock:
            running.remove(host.name)

    def nested(host: Host) -> list[bool]:
        return [one.ok for one in each(HOSTS, action)]

    for hosts in (HOSTS, HOSTS[:1]):
        with limited(FanOutLimits(parallel=1)):
            outcomes = each(hosts, nested)
        assert all(one.value == [True] * 3 for one in outcomes) and most == 1


@pytest.mark.parametrize(
    ("hosts", "parallel", "timeout", "expected"),
    [
        (40, None, None, 32),
        (4, None, None, 4),
        (40, None, 6.0, 40),  # each is answered or given up in 6 s
        (40, 8, None, 8),
        (40, 8, 6.0, 8),
        (0, None, 6.0, 0),
    ],
)
def test_how_many_hosts_at_once(hosts: int, parallel: int | None, timeout: float | None, expected: int) -> None:
    assert FanOutLimits(parallel).at_once(hosts, timeout) == expected


def test_a_host_that_takes_too_long_is_interrupted_alone_and_may_clean_up() -> None:
    cleaned: list[str] = []

    def action(host: Host) -> str:
        try:
            if host.name == "b":
                interruption.sleep(LONG_S)
        except FleetError:
            with interruption.interrupted_by(threading.Event()):  # as a lock is released
                interruption.sleep(0.01)
            cleaned.append(host.name)
            raise
        return host.name

    with limited(FanOutLimits(host_s=0.3)):
        a, b, c = each(HOSTS, action)
    assert (a.value, c.value) == ("a", "c") and cleaned == ["b"]
    assert b.error is not None and b.error.message == "b: not done within 0.3 s" and "--timeout" in b.error.hint


def test_connecting_takes_no_longer_than_the_time_that_is_left() -> None:
    assert SSHTimeouts().within(1.5) == SSHTimeouts(1.5, 1.5, 1.5, 1.5, SSHTimeouts().dead_link)
    assert SSHTimeouts().within(float("inf")) == SSHTimeouts()
    assert SSHTimeouts().within(0.0).connect == SHORTEST_S


def test_an_error_of_the_fleet_stays_with_its_host_and_a_bug_is_raised() -> None:
    def refuse(host: Host) -> None:
        if host.name == "b":
            raise FleetError("b: no")

    assert [outcome.ok for outcome in each(HOSTS, refuse)] == [True, False, True]

    def broken(host: Host) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        each(HOSTS, broken)


def test_an_action_that_runs_on_many_hosts_itself_is_interrupted_with_them() -> None:
    stop, interrupted = threading.Event(), list[str]()

    def wait(host: Host) -> None:
        stop.set()  # as soon as one has begun
        try:
            interruption.sleep(LONG_S)
        except Cancelled:
            interrupted.append(host.name)
            raise

    with interruption.interrupted_by(stop), pytest.raises(Cancelled):
        each(HOSTS[:1], wait)
    assert interrupted == ["a"]


def test_a_background_action_is_interrupted_when_its_block_is_left() -> None:
    running, ended = set[str](), set[str]()

    def action(host: Host) -> None:
        running.add(host.name)
        try:
            interruption.sleep(LONG_S)
        finally:
            ended.add(host.name)

    with in_background(HOSTS, action):
        wait_until(lambda: len(running) == 3)
        assert not ended
    assert ended == {"a", "b", "c"}
