"""Readings of a host's health as letters, u for healthy and d for anything else, and the changes that they show."""

from __future__ import annotations

import pytest

from disagg.api.watch import HostChange
from disagg.fleet.lifecycle.status.host_status import HealthState, HostStatus
from disagg.fleet.lifecycle.watch.changes import FleetWatch, explained


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
