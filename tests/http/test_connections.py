"""disagg/http/connections.py: which connection makes room for a new one."""

from __future__ import annotations

import pytest

from disagg.http.connections import ConnectionBounds, ServedConnection, least_useful, make_room

BOUNDS = ConnectionBounds()


def connections(count: int, *, proven: bool = False, busy: bool = False, address: str = "") -> list[ServedConnection]:
    """Idle for longer the earlier they are; each from an address of its own, unless one is given."""
    return [
        ServedConnection(address or f"{proven}.{busy}.{index}", idle_since=float(index), proven=proven, busy=busy)
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
        ServedConnection(sign, idle_since=float(at), proven=sign in "pP", busy=sign.isupper())
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
