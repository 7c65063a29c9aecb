"""Which model is loaded next and which ones go for it, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import pytest

from disagg.keeper.policy import (
    DRAIN_S,
    NEVER_S,
    Action,
    Limits,
    Load,
    Outlook,
    Seen,
    Unload,
    Want,
    decide,
    outlook,
    refusal,
)

NOW = 1000.0
OLD = NOW - 100
YOUNG = NOW - 10  # of a model that has to stay 20 s longer
LIMITS = Limits(budget=100, min_stay_s=30.0)


def ready(name: str, need: int = 40, used: float = OLD, at: float = OLD, **more: object) -> Seen:
    return replace(Seen(name, "ready", need, ready_at=at, used_at=used), **more)  # type: ignore[arg-type]


def asleep(name: str, need: int = 40) -> Seen:
    return Seen(name, "asleep", need)


def want(name: str, need: int = 40, *, evicts: bool = True) -> Want:
    return Want(name, need, evicts)


class Case(NamedTuple):
    about: str
    models: Sequence[Seen]
    wants: Sequence[Want]
    actions: Sequence[Action]
    again_at: float = inf
    limits: Limits = LIMITS


a, b, c = ready("a", used=OLD), ready("b", used=OLD + 1), asleep("c")
CASES = [
    Case("nothing is asked for", [a, b, c], [], []),
    Case("there is room", [a, c], [want("c")], [Load("c")]),
    Case("one that loads is waited for", [Seen("a", "loading", 40), c], [want("c")], []),
    Case("the first of those that wait is next", [asleep("b"), c], [want("c"), want("b")], [Load("c")]),
    Case("the least recently used one goes", [b, a, c], [want("c")], [Unload("a", "room")]),
    Case(
        "as many go as are needed", [b, a, asleep("d", 90)], [want("d", 90)], [Unload("a", "room"), Unload("b", "room")]
    ),
    Case(
        "one that is too small to matter stays",
        [ready("s", 5, used=OLD - 9), ready("m", 60), asleep("d", 90)],
        [want("d", 90)],
        [Unload("m", "room")],
    ),
    Case("what is going is waited for", [a, Seen("b", "draining", 40), c], [want("c")], []),
    Case("a pinned one stays", [ready("a", pinned=True), b, c], [want("c")], [Unload("b", "room")]),
    Case(
        "one with requests stays while another can go",
        [ready("a", busy=True), b, c],
        [want("c")],
        [Unload("b", "room")],
    ),
    Case("one that has just been loaded stays", [ready("a", at=YOUNG), b, c], [want("c")], [Unload("b", "room")]),
    Case(
        "all have just been loaded",
        [ready("a", at=YOUNG), ready("b", at=YOUNG + 5), c],
        [want("c")],
        [],
        YOUNG + 30,
    ),
    Case(
        "a young one that is idle is waited for rather than one with requests",
        [ready("a", busy=True), ready("b", at=YOUNG), c],
        [want("c")],
        [],
        YOUNG + 30,
    ),
    Case(
        "all have requests: the one that was loaded first takes its turn",
        [ready("b", at=OLD + 5, busy=True), ready("a", busy=True), c],
        [want("c")],
        [Unload("a", "room", drains=True)],
    ),
    Case(
        "all have requests, and none has had its time",
        [ready("a", at=YOUNG, busy=True), ready("b", at=YOUNG + 1, busy=True), c],
        [want("c")],
        [],
        YOUNG + 30,
    ),
    Case("pinned ones with requests are never drained", [ready("a", 90, pinned=True, busy=True), c], [want("c")], []),
    Case("a preload takes nobody's room", [a, b, c], [want("c", evicts=False)], []),
    Case(
        "and does not hold up those after it",
        [a, b, c, asleep("d", 20)],
        [want("c", evicts=False), want("d", 20)],
        [Load("d")],
    ),
    Case(
        "no later one takes the room of the first",
        [a, b, c, asleep("d", 20)],
        [want("c"), want("d", 20)],
        [Unload("a", "room")],
    ),
    Case(
        "there are no more places",
        [ready("a", 1), ready("b", 1, used=OLD + 1), asleep("c", 1)],
        [want("c", 1)],
        [Unload("a", "max_loaded")],
        limits=Limits(100, max_loaded=2),
    ),
    Case("one that nobody has used goes", [ready("a", goes_at=NOW - 1), b], [], [Unload("a", "idle")]),
    Case("as it was asked to", [ready("a", goes_at=NOW - 1, goes_for="asked"), b], [], [Unload("a", "asked")]),
    Case("later", [ready("a", goes_at=NOW + 5), b], [], [], NOW + 5),
    Case("not while it has requests", [ready("a", goes_at=NOW - 1, busy=True), b], [], []),
    Case("nor if it is pinned", [ready("a", goes_at=NOW - 1, pinned=True), b], [], []),
    Case("others of the machine take room: an idle one goes", [a, b], [], [Unload("a", "room")], limits=Limits(50)),
    Case(
        "min_stay of 0 still leaves time to come",
        [ready("a", 90, at=NOW - 0.5), c],
        [want("c")],
        [],
        NOW + 0.5,
        Limits(100, None, 0.0),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.about)
def test_what_is_done(case: Case) -> None:
    decision = decide(case.models, case.wants, case.limits, NOW)
    assert (list(decision.actions), decision.again_at) == (list(case.actions), case.again_at)


def test_what_is_missing_whatever_goes_is_stated_for_the_other_hosts_of_the_machine() -> None:
    decision = decide([ready("a", 60, pinned=True), asleep("c", 70)], [want("c", 70)], LIMITS, NOW)
    assert (decision.actions, decision.short) == ((), 30)


@pytest.mark.parametrize(
    ("need", "models", "limits", "why"),
    [
        (100, [a], LIMITS, ""),
        (101, [], LIMITS, "memory"),
        (70, [ready("a", pinned=True)], LIMITS, "pinned memory"),
        (70, [replace(asleep("a"), pinned=True)], LIMITS, ""),
        (1, [ready("a", 1, pinned=True)], Limits(100, max_loaded=1), "pinned places"),
        (1, [ready("a", 1)], Limits(100, max_loaded=1), ""),
    ],
)
def test_what_can_never_be_loaded_is_known_before_anything_goes(
    need: int, models: list[Seen], limits: Limits, why: str
) -> None:
    assert refusal(need, models, limits, "new") == why


def test_the_outlook_counts_loads_in_turn_and_what_has_to_go_first() -> None:
    models = [ready("a", at=YOUNG), Seen("b", "loading", 40), c, asleep("d"), ready("p", 10, pinned=True)]
    seconds = dict.fromkeys("abcdp", 5.0) | {"b": 2.0}
    found = outlook(models, [want("c")], LIMITS, NOW, seconds)
    assert found == {
        "a": Outlook(0.0, 0, evicts=False),
        "p": Outlook(0.0, 0, evicts=False),
        "b": Outlook(2.0, 0, evicts=False),
        "c": Outlook(2 + 20 + 5, 1, evicts=True),
        "d": Outlook(2 + 20 + 5 + 20 + 5, 2, evicts=True),
    }


def test_a_model_with_requests_is_expected_to_take_a_while_to_answer_them() -> None:
    models = [ready("a", 90, busy=True), c]
    assert outlook(models, [], LIMITS, NOW, dict.fromkeys("ac", 5.0))["c"].wait_s == DRAIN_S + 5


def test_a_model_that_other_hosts_could_make_room_for_is_not_given_up() -> None:
    models, seconds = [ready("a", 90, pinned=True), c], dict.fromkeys("ac", 5.0)
    assert outlook(models, [], LIMITS, NOW, seconds)["c"].wait_s == NEVER_S
    assert outlook(models, [], replace(LIMITS, elsewhere=30), NOW, seconds)["c"].wait_s == DRAIN_S + 5


@pytest.mark.parametrize("min_stay_s", [5.0, 30.0])
def test_two_models_that_take_turns_neither_thrash_nor_starve(min_stay_s: float) -> None:
    """Both always have requests, and there is room for one."""
    limits, minutes = Limits(50, None, min_stay_s), 10
    state: dict[str, Seen] = {name: asleep(name) for name in "ab"}
    loads, waited, asked = 0, {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
    for second in range(minutes * 60):
        now = float(second)
        for name, one in state.items():
            if one.state == "draining":
                state[name] = asleep(name)
            if one.state in ("ready", "loading"):
                state[name], asked[name] = ready(name, at=one.ready_at, busy=True), now
        wants = [want(name) for name in sorted(asked, key=lambda name: asked[name]) if state[name].state == "asleep"]
        for action in decide(list(state.values()), wants, limits, now).actions:
            if isinstance(action, Load):
                loads += 1
                waited[action.model] = max(waited[action.model], now - asked[action.model])
                state[action.model] = replace(asleep(action.model), state="loading", ready_at=now + 1)
            else:
                state[action.model] = replace(state[action.model], state="draining")
    assert loads <= minutes * 60 / min_stay_s + 1
    assert max(waited.values()) <= min_stay_s + 5
