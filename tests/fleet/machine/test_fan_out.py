"""One action on many hosts: order, errors, deadlines, and what runs in the background."""

from __future__ import annotations

import threading

import pytest

from disagg.config import EngineOptions, Host
from disagg.errors import Cancelled, FleetError
from disagg.fleet.machine import interruption
from disagg.fleet.machine.fan_out import each, in_background
from tests.deadlines import LONG_S
from tests.fleet.farm import wait_until

HOSTS = [
    Host(name, "127.0.0.1", ("prefill",), "tiny", EngineOptions("transformers"), 8000, connector="local")
    for name in ("a", "b", "c")
]


def test_a_host_that_hangs_is_left_behind_and_reported_as_timed_out() -> None:
    released = threading.Event()

    def action(host: Host) -> str:
        if host.name == "b":
            released.wait(LONG_S)  # cannot be interrupted, as a name look-up
        return host.name

    try:
        a, b, c = each(HOSTS, action, timeout=0.9)
    finally:
        released.set()
    assert (a.value, c.value) == ("a", "c") and a.ok and c.ok
    assert b.timed_out and b.error is not None and b.error.message == "b: no answer within 0.9 s"


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
    outcomes = each(HOSTS, lambda host: together.wait(LONG_S), limit=1, timeout=LONG_S)
    assert all(outcome.ok for outcome in outcomes)


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
