"""The policy of a rollout, as a table. A host is NAME:PHASE, then ! if it is down and . if its release is current."""

from __future__ import annotations

import pytest

from disagg.fleet.rollout.policy import HostState, Phase, next_turn

ROLES = {"p": "prefill", "d": "decode", "g": "gateway"}


def hosts(line: str) -> list[HostState]:
    found = []
    for word in line.split():
        name, _, phase = word.rstrip("!.").partition(":")
        chosen: Phase = phase  # type: ignore[assignment]  # checked by the policy's own types elsewhere
        serves = frozenset({("m", ROLES[name[0]])})
        found.append(HostState(name, serves, chosen, "!" not in word, "." not in word))
    return found


def turn_of(line: str, max_unavailable: int = 1, undo: bool = False) -> str:
    turn = next_turn(hosts(line), max_unavailable, undo)
    return f"blocked: {turn.blocked}" if turn.blocked else " ".join(f"{turn.action} {name}" for name in turn.hosts)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("p1:before p2:before d1:before d2:before", "restart p1"),
        ("p1:new p2:before d1:before d2:before", "test p1"),
        ("p1:passed p2:before d1:before d2:before", "restart p2"),
        ("p1:passed p2:passed d1:passed d2:passed", ""),
        ("p1:before p2:before!", "restart p2"),
        ("p1:outside p2:outside", ""),
        ("p1:outside p2:before", "restart p2"),
        ("p1:before", "restart p1"),
        ("p1:before d1:before", "restart p1"),
        ("p1:passed p2:new p3:new", "test p2 test p3"),
    ],
)
def test_a_rollout_restarts_one_host_tests_it_and_goes_on(line: str, expected: str) -> None:
    assert turn_of(line) == expected


@pytest.mark.parametrize(
    ("line", "most", "expected"),
    [
        ("p1:before p2:before d1:before d2:before", 2, "restart p1 restart d1"),
        ("p1:before p2:before p3:before d1:before", 2, "restart p1 restart p2"),
        ("p1:before p2:before p3:before d1:before", 9, "restart p1 restart p2 restart d1"),
        ("p1:before p2:before! p3:before", 1, "restart p2"),
        ("p1:before p2:outside! p3:before", 1, "blocked: p2 is down, and p1 would be too"),
        ("p1:before p2:outside! p3:before", 2, "restart p1"),
        ("p1:before p2:outside! d1:outside", 2, "blocked: p1 is the last healthy host for prefill of m"),
        ("p1:before! p2:before! d1:before!", 1, "restart p1"),
    ],
)
def test_hosts_stay_up_as_the_settings_and_their_models_need(line: str, most: int, expected: str) -> None:
    assert turn_of(line, most) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("p1:failed! p2:before d1:before", "forget p2 forget d1"),
        ("p1:failed! p2:before. d1:before.", "return p1"),
        ("p1:failed p2:before. d1:before.", "return p1"),  # it serves wrong answers
        ("p1:passed p2:failed! d1:before.", "return p2"),
        ("p1:passed p2:back d1:before.", "return p1"),
        ("p1:back p2:back d1:before.", ""),
        ("p1:stuck! p2:passed", "blocked: p1 is down, and p2 would be too"),
        ("p1:stuck! p2:before.", ""),
        ("p1:new p2:failed! d1:before.", "return p2"),
        ("p1:new p2:back d1:before.", "return p1"),
    ],
)
def test_after_a_failure_changed_hosts_go_back_the_failed_ones_first(line: str, expected: str) -> None:
    assert turn_of(line) == expected


def test_what_could_not_be_deployed_everywhere_is_forgotten_everywhere() -> None:
    assert turn_of("p1:before p2:before", undo=True) == "forget p1 forget p2"
    assert turn_of("p1:before. p2:before.", undo=True) == ""
    assert turn_of("p1:passed p2:before.", undo=True) == "return p1"
