"""disagg/http/protocol.py: which connection makes room for a new one."""

from __future__ import annotations

import pytest

from disagg.http.protocol import NEW_S, ConnectionBounds, ServedConnection, has_place, least_useful, make_room

BOUNDS = ConnectionBounds()


def connections(
    count: int, *, proven: bool = False, busy: bool = False, address: str = "", new: bool = False
) -> list[ServedConnection]:
    """Idle for longer the earlier they are; each from an address of its own, unless one is given. new: just opened, a
    millisecond after each other."""
    return [
        ServedConnection(
            address or f"{proven}.{busy}.{index}",
            idle_since=(index - count) / 1000 if new else float(index - count),
            answered=not new,
            proven=proven,
            busy=busy,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("crowd", "victim"),
    [
        ("pu", "u"),
        ("PU", None),
        ("pP", "p"),
        ("upu", "u"),
        ("", None),
    ],
)
def test_the_least_useful_connection_is_idle_and_unproven_if_there_is_one(crowd: str, victim: str | None) -> None:
    """p: proven, u: unproven; capitals are busy. The first ones are idle for longest."""
    all_of_them = [
        ServedConnection(sign, idle_since=float(at), answered=True, proven=sign in "pP", busy=sign.isupper())
        for at, sign in enumerate(crowd)
    ]
    chosen = least_useful(all_of_them)
    assert (chosen and chosen.address) == victim
    assert chosen is None or chosen is all_of_them[crowd.index(chosen.address)]


def test_while_there_is_room_nothing_is_closed() -> None:
    others = connections(BOUNDS.unproven - 1) + connections(BOUNDS.connections - BOUNDS.unproven, proven=True)
    new = ServedConnection("new")
    assert make_room(new, others, BOUNDS) is None and not new.surplus


def test_one_address_takes_the_place_of_its_own_connections() -> None:
    others = connections(3) + connections(BOUNDS.unproven_per_address, address="crowd")
    assert make_room(ServedConnection("crowd"), others, BOUNDS) is others[3]
    assert make_room(ServedConnection("other"), others, BOUNDS) is None


def test_a_connection_that_was_just_opened_is_not_closed_for_the_next_one() -> None:
    """A server accepts a whole burst before it reads the first request of it."""
    others: list[ServedConnection] = []
    for _ in range(BOUNDS.unproven):
        new = ServedConnection("gateway")
        assert make_room(new, others, BOUNDS) is None and not new.surplus
        others.append(new)
    new = ServedConnection("gateway")
    assert make_room(new, others, BOUNDS) is None and new.surplus, "answered with 503"


@pytest.mark.parametrize(("age_s", "is_new"), [(0.0, True), (NEW_S - 0.1, True), (NEW_S, False), (1e9, False)])
def test_a_connection_that_sends_nothing_is_new_for_seconds(age_s: float, is_new: bool) -> None:
    assert ServedConnection("silent").is_new(age_s) is is_new
    assert not ServedConnection("poller", answered=True).is_new(age_s)


def test_an_address_that_opens_many_connections_does_not_lock_out_another() -> None:
    crowd = connections(BOUNDS.unproven, address="crowd", new=True)
    assert make_room(ServedConnection("other"), crowd, BOUNDS) is crowd[0], "though it is new"
    others = connections(64, new=True) + crowd[64:]
    assert make_room(ServedConnection("other"), others, BOUNDS) is crowd[64]


def test_of_idle_connections_those_of_an_address_with_too_many_go_first() -> None:
    crowd = connections(BOUNDS.unproven_per_address + 1, address="crowd")
    others = connections(BOUNDS.unproven - len(crowd)) + crowd
    assert make_room(ServedConnection("other"), others, BOUNDS) is crowd[0]


def test_512_pollers_and_64_silent_connections_of_one_address_lock_nobody_out() -> None:
    others = connections(BOUNDS.unproven_per_address, address="crowd", new=True)
    for _ in range(512):
        poller = ServedConnection("crowd")
        victim = make_room(poller, others, BOUNDS)
        others = [one for one in others if one is not victim] + [poller]
        poller.answered = True
    assert sum(one.answered for one in others) == BOUNDS.unproven_per_address, "of those that poll"
    new = ServedConnection("other")
    assert make_room(new, others, BOUNDS) is None and not new.surplus


def test_a_place_for_those_that_have_shown_a_token_is_free_whatever_the_others_do() -> None:
    crowd = connections(BOUNDS.unproven, new=True)
    new = ServedConnection("caller")
    assert make_room(new, crowd, BOUNDS) is None and new.surplus, "as long as it has not shown its token"
    assert has_place([*crowd, new], BOUNDS)
    proven = connections(BOUNDS.connections - BOUNDS.unproven, proven=True, busy=True)
    assert not has_place([*crowd, *proven, new], BOUNDS)


def test_callers_without_a_token_cannot_take_the_places_of_those_with_one() -> None:
    others = connections(10, proven=True) + connections(BOUNDS.unproven)
    assert make_room(ServedConnection("new"), others, BOUNDS) is others[10]


def test_a_caller_with_the_token_is_not_bounded_by_its_address() -> None:
    others = connections(BOUNDS.connections - 1, proven=True, busy=True, address="gateway")
    assert make_room(ServedConnection("gateway"), others, BOUNDS) is None


def test_without_an_idle_connection_the_new_one_is_surplus() -> None:
    others = connections(BOUNDS.connections, proven=True, busy=True)
    new = ServedConnection("new")
    assert make_room(new, others, BOUNDS) is None and new.surplus


def test_surplus_connections_take_each_others_places_only() -> None:
    others = connections(BOUNDS.connections, proven=True, busy=True) + connections(BOUNDS.surplus)
    for one in others[BOUNDS.connections :]:
        one.surplus = True
    new = ServedConnection("new")
    assert make_room(new, others, BOUNDS) is others[BOUNDS.connections] and new.surplus
