"""What tests.integration.two_operators takes for a fault, without a fleet."""

from __future__ import annotations

import pytest

from tests.integration.two_operators import Command, HostTruth, Truth, differences, faults, tables

HOST = HostTruth("aa", "aa", ("t1",))
DONE, REFUSED = (
    Command("deploy", 0, ""),
    Command("stop", 1, "error: a is locked: ada@desk holds it for `disagg deploy`"),
)


def fleet(*, runs: str = "aa", current: str = "aa", tokens: tuple[str, ...] = ("t1",)) -> Truth:
    """Of two hosts, the second of which is like this."""
    return {"a": HOST, "b": HostTruth(runs, current, tokens)}


@pytest.mark.parametrize(
    ("truth", "found"),
    [
        (fleet(), ()),
        (fleet(runs="bb", current="bb"), ("different code runs", "different code is pending")),
        (fleet(runs=""), ("some are down",)),
        (fleet(tokens=("t1", "t2")), ("different tokens", "two tokens")),
        ({"a": HostTruth("", "aa", ("t1",))}, ("all are down",)),
        ({"a": HostTruth("aa", "bb", ("t1",)), "b": HostTruth("aa", "bb", ("t1",))}, ()),
    ],
)
def test_hosts_differ_by_what_runs_what_is_pending_and_their_tokens(truth: Truth, found: tuple[str, ...]) -> None:
    assert differences(truth) == found


@pytest.mark.parametrize(
    ("commands", "truth", "status", "found"),
    [
        ([DONE, REFUSED], fleet(), 0, []),
        ([DONE, REFUSED], fleet(runs=""), 3, []),
        ([DONE, REFUSED], fleet(runs="bb"), 0, ["status ends with 0, and different code runs"]),
        ([REFUSED, REFUSED], fleet(), 0, ["both were refused"]),
        ([REFUSED], fleet(), 0, []),
        (
            [DONE, Command("stop", 1, "a is locked", touched=("a",))],
            fleet(),
            0,
            ["stop was refused, and has changed a"],
        ),
        ([Command("deploy", 1, "Traceback")], fleet(), 0, ["deploy ends in a traceback"]),
    ],
)
def test_what_must_not_be_is_named(commands: list[Command], truth: Truth, status: int, found: list[str]) -> None:
    assert list(faults(commands, truth, status, "healthy")) == found


@pytest.mark.parametrize(
    ("said", "found"), [("→ disagg token rotate", ()), ("", ("status says nothing about two tokens",))]
)
def test_two_tokens_on_all_hosts_are_no_difference_and_have_to_be_said(said: str, found: tuple[str, ...]) -> None:
    both = {name: HostTruth("aa", "aa", ("t1", "t2")) for name in ("a", "b")}
    assert faults([DONE], both, 0, said) == found


def test_the_tables_count_who_had_the_locks_and_how_killed_commands_left_the_fleet() -> None:
    def row(what: str, *outcomes: str, then: tuple[str, ...] = (), faults: tuple[str, ...] = ()) -> dict[str, object]:
        return {"what": what, "outcomes": outcomes, "then": then, "status": 0, "faults": faults, "offset": 1.5}

    shown = tables(
        [
            row("deploy, stop", "done", "refused"),
            row("deploy, stop", "refused", "done"),
            row("deploy, stop", "done", "refused"),
            row("stop killed", "killed", then=("some are down",)),
            row("stop killed, and again", "done", faults=("it is bad",)),
        ]
    )
    assert "| deploy |  |  |  | 2 first, 1 second |  |" in shown
    assert "| stop | 1 some are down | 1 0 |  | 1 done | 1 alike |" in shown
    assert shown.endswith("5 trials, 1 faults\nstop killed, and again, 1.5 s: it is bad")
