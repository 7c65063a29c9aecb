"""What the figures of the gateway's benchmark mean."""

from __future__ import annotations

import pytest

from benchmarks.gateway import Pair, figures
from benchmarks.gateway_ways import Times, within
from benchmarks.medians import Estimate, estimate

WITHIN = Times(0.1, 0.01)


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        (1, 0, 0),
        (5, 0, 4),
        (10, 0, 9),
        (60, 21, 38),  # the 22nd and the 39th
        (100, 39, 60),  # the 40th and the 61st
    ],
)
def test_the_interval_of_a_median_lies_between_two_values_of_binomial_rank(count: int, low: int, high: int) -> None:
    found = estimate([float(value) for value in reversed(range(count))])
    assert (found.low, found.high) == (low, high)
    assert found.median == (count - 1) / 2


def test_what_the_gateway_adds_is_judged_by_pairs_not_by_the_medians_of_each_way() -> None:
    """A prompt that takes long takes long both ways."""
    slow, fast = 0.500, 0.100
    pairs = [Pair(Times(base, 0.010), Times(base + 0.003, 0.0101, WITHIN)) for base in (slow, fast) * 10]
    found = figures(pairs)
    assert found["added_ttft_ms"]["median"] == pytest.approx(3.0)
    assert found["added_ttft_ms"]["high"] == pytest.approx(3.0)
    assert found["added_tpot"]["median"] == pytest.approx(0.01)
    assert found["client"]["ttft_ms"] == pytest.approx(300.0)


def test_what_is_the_gateway_s_own_is_recognised_by_its_answers_alone() -> None:
    """Whatever the client's answers of the same pairs took."""
    pairs = [Pair(Times(wait, 0.010), Times(0.104, 0.0102, Times(0.102, 0.010))) for wait in (0.05, 0.15)]
    found = figures(pairs)
    assert found["own_ttft_ms"] == pytest.approx({"median": 2.0, "low": 2.0, "high": 2.0})
    assert found["own_tpot"]["median"] == pytest.approx(0.02)
    assert within({"ttft": 0.5, "total_time": 1.13}, 64).tpot == pytest.approx(0.01)


@pytest.mark.parametrize(("low", "high", "verdict"), [(1, 5, "met"), (4, 6, "undecided"), (5.1, 6, "not met")])
def test_a_goal_within_the_interval_is_neither_met_nor_missed(low: float, high: float, verdict: str) -> None:
    assert Estimate((low + high) / 2, low, high).judged(5) == verdict
