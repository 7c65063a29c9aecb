"""When a sender is given up because it sends and gets nowhere, as a table of what arrives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg.kv.receive.pace import Arrived, Pace, ReceiveLimits

LIMITS = ReceiveLimits()
EXPECTED = 8 << 20
SWEEP_S = 0.1

Arriving = Callable[[Arrived, float], None]


def trickle(arrived: Arrived, now: float) -> None:
    """One byte a second."""
    if now % 1.0 < SWEEP_S:
        arrived.piece(memoryview(b"x"))


def link_of(rate: float) -> Arriving:
    """A link of so many bytes per second."""
    return lambda arrived, now: arrived.piece(memoryview(bytes(int(rate * SWEEP_S))))


def idle(arrived: Arrived, now: float) -> None:
    """Idle frames; the engine does nothing."""
    arrived.idle(7)


def busy(arrived: Arrived, now: float) -> None:
    """Idle frames, while the engine works for other prompts."""
    arrived.idle(int(now / SWEEP_S))


def silent(arrived: Arrived, now: float) -> None:
    """Nothing."""


def held_back(arrived: Arrived, now: float) -> None:
    """Idle frames, since the receiver lets nothing be sent."""
    arrived.waits = lambda: True
    arrived.idle(7)


def half_then(what: Arriving) -> Arriving:
    def arriving(arrived: Arrived, now: float) -> None:
        if now < 2.0:
            arrived.piece(memoryview(bytes(EXPECTED // 40)))
        else:
            what(arrived, now)

    return arriving


def given_up_after(arriving: Arriving, elsewhere_s: float | None, *, expected: int = EXPECTED) -> float | None:
    """Seconds after which such a sender is given up; None if it is not within a minute."""
    pace = Pace(elsewhere_s)
    arrived = pace.join(expected, 0.0)
    for number in range(1, 600):
        now = number * SWEEP_S
        arriving(arrived, now)
        if pace.problem(now, LIMITS) is not None:
            return round(now, 1)
    return None


@pytest.mark.parametrize(
    ("arriving", "elsewhere_s", "after_s"),
    [
        (trickle, 0.2, 2.0),  # two pieces must have come
        (trickle, 3.0, 3.0),
        (trickle, None, 10.0),
        (idle, 0.2, 0.6),  # the first idle frame may mean that the engine works
        (idle, 3.0, 3.1),
        (idle, None, 10.1),
        (half_then(idle), 1.0, 3.0),
        (half_then(trickle), 2.0, 3.9),
        (busy, 0.2, 10.4),
        (busy, 5.0, 24.9),
        (held_back, 0.2, None),
        (silent, 1.0, None),  # `stall_s` bounds it
        (link_of(0.3e6), 1.0, None),  # slow, and merely warned of
        (link_of(0.3e6), None, None),
        (link_of(20e3), 1.0, None),
        (link_of(10e3), 1.0, 1.0),
        (link_of(10e3), 1000.0, None),  # the rest arrives before it would in another way
    ],
)
def test_a_sender_is_given_up_once_its_kv_would_have_come_in_another_way(
    arriving: Arriving, elsewhere_s: float | None, after_s: float | None
) -> None:
    assert given_up_after(arriving, elsewhere_s) == pytest.approx(after_s, abs=0.11) if after_s else True
    assert (given_up_after(arriving, elsewhere_s) is None) == (after_s is None)


def test_a_sender_that_has_sent_all_but_the_end_is_given_up_too() -> None:
    def all_then_idle(arrived: Arrived, now: float) -> None:
        (idle if now > 1.0 else link_of(EXPECTED))(arrived, now)

    assert given_up_after(all_then_idle, 1.0) is not None


def test_no_sender_is_judged_before_its_connection() -> None:
    assert Pace(0.0).problem(1e9, LIMITS) is None


def test_the_parts_of_a_transfer_are_judged_together() -> None:
    """One rank has sent its part, another one idles."""
    pace = Pace(1.0)
    first, second = pace.join(EXPECTED, 0.0), pace.join(EXPECTED, 0.0)
    for number in range(1, 11):
        first.piece(memoryview(bytes(EXPECTED // 20)))
        second.idle(3)
        assert pace.problem(number * SWEEP_S, LIMITS) is None
    for number in range(11, 40):
        second.idle(3)
        if (problem := pace.problem(number * SWEEP_S, LIMITS)) is not None:
            break
    assert problem is not None and "4.0 MiB of 8.0 MiB" in problem.message


def test_that_a_connection_is_there_is_no_progress_so_the_second_byte_of_a_trickle_is_the_last() -> None:
    def from_the_first_moment(arrived: Arrived, now: float) -> None:
        trickle(arrived, now - SWEEP_S)

    given_up = given_up_after(from_the_first_moment, 0.6)
    assert given_up is not None and given_up <= 1.0 + 2 * SWEEP_S
