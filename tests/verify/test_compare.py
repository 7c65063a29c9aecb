from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

from disagg.api.verify import RunComparison, VerifyBounds
from disagg.config import DType
from disagg.verify.compare import (
    ALONE,
    NOISE,
    OTHER_WEIGHTS,
    Comparisons,
    EngineRun,
    Runs,
    audit_tolerance,
    bounds,
    bounds_alone,
    compare,
    interval,
    summary,
    within,
)

TWO = [[0.0, math.log(3.0)], [math.log(4.0), 0.0]]
"""Two positions of two tokens: probabilities of 1/4 and 3/4, then of 4/5 and 1/5."""
LOW, HIGH = interval(1, 2)


def run(logits: Any, tokens: tuple[int, ...] = (5, 6)) -> EngineRun:
    return EngineRun(tokens, numpy.array(logits, numpy.float32))


def comparison(kl: float, top1: float, *, positions: int = 100, difference: float = 0.0) -> RunComparison:
    low, high = interval(round(top1 * positions), positions)
    return RunComparison(2, None, difference, kl, top1, low, high)


def test_a_run_does_not_differ_from_itself() -> None:
    assert compare(run(TWO), run(TWO)) == RunComparison(2, None, 0.0, 0.0, 1.0, interval(2, 2)[0], 1.0)


def test_the_constant_in_logits_is_no_difference() -> None:
    """Engines that give log-probabilities are compared with those that give logits."""
    found = compare(run(TWO), run([[7.0 + x for x in row] for row in TWO]))
    assert found.max_logit_diff < 1e-6 and found.mean_kl < 1e-9


def test_kl_is_the_mean_over_positions_in_nats() -> None:
    found = compare(run([[0.0, 0.0], [0.0, 0.0]]), run(TWO))
    first = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    second = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    assert found.mean_kl == pytest.approx((first + second) / 2, rel=1e-6)


def test_the_largest_difference_is_of_normalised_logits() -> None:
    found = compare(run([[0.0, 0.0]], (5,)), run([[0.0, math.log(3.0)]], (5,)))
    assert found.max_logit_diff == pytest.approx(math.log(2.0), rel=1e-6)


def test_top1_counts_positions_with_the_same_likeliest_token() -> None:
    found = compare(run(TWO), run([[0.0, 1.0], [0.0, 1.0]]))
    assert (found.top1, found.top1_low, found.top1_high) == (0.5, LOW, HIGH)


@pytest.mark.parametrize(
    ("tokens", "equal", "first"), [((5, 6), 2, None), ((5, 7), 1, 1), ((4, 6), 0, 0)], ids=["all", "one", "none"]
)
def test_tokens_are_counted_up_to_the_first_that_differs(
    tokens: tuple[int, int], equal: int, first: int | None
) -> None:
    found = compare(run(TWO), run(TWO, tokens))
    assert (found.equal_tokens, found.first_divergence) == (equal, first)


@pytest.mark.parametrize(
    ("agreeing", "positions", "low", "high"),
    [
        (64, 64, 0.9434, 1.0),
        (62, 64, 0.8930, 0.9914),
        (32, 64, 0.3811, 0.6189),
        (0, 64, 0.0, 0.0566),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_the_interval_of_a_share_is_wilsons(agreeing: int, positions: int, low: float, high: float) -> None:
    assert interval(agreeing, positions) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_same_weights_may_differ_by_the_rounding_of_their_dtype(dtype: DType) -> None:
    near = comparison(0.0, 1.0)
    assert bounds(dtype, same_weights=True, alone=near) == NOISE[dtype]
    assert bounds_alone(dtype, same_weights=True) == ALONE[dtype]


def test_a_hand_off_may_differ_as_the_engines_alone_do() -> None:
    """Engines that alone differ by 0.02 in a logit, and whose tokens are all the same."""
    alone, again = comparison(2e-6, 1.0, difference=0.02), comparison(1e-6, 1.0, difference=0.001)
    limits = bounds("float32", same_weights=True, alone=alone, again=(again, again))
    assert within(alone, bounds_alone("float32", same_weights=True))
    assert within(comparison(2e-6, 1.0, difference=0.021), limits)
    assert not within(comparison(2e-6, 1.0, difference=0.07), limits)
    assert not within(comparison(2e-6, 0.99, difference=0.021), limits)
    assert not within(comparison(1e-6, 1.0, difference=0.2), bounds_alone("float32", same_weights=True))
    half = bounds("bfloat16", same_weights=True, alone=comparison(0.02, 0.9), again=(comparison(0.08, 0.9),))
    assert half.max_kl == pytest.approx(1.25 * 0.08) and half.min_top1 == NOISE["bfloat16"].min_top1


def test_other_weights_may_differ_by_what_the_two_engines_differ_by_alone() -> None:
    exact = bounds("float32", same_weights=False, alone=comparison(0.04, 0.97))
    assert exact.max_kl == pytest.approx(1.25 * 0.04 + 1e-5)
    assert exact.min_top1 == pytest.approx(0.97 - math.sqrt(2) * (0.97 - interval(97, 100)[0]))
    assert exact.max_logit_diff is None, "tokens need not be equal"
    half = bounds("bfloat16", same_weights=False, alone=comparison(0.04, 0.97))
    assert half.max_kl == pytest.approx(0.10)
    assert half.min_top1 == pytest.approx(0.85 * exact.min_top1)
    assert bounds("float32", same_weights=False, alone=comparison(9.0, 0.0)).min_top1 == 0.0
    assert bounds_alone("bfloat16", same_weights=False) == OTHER_WEIGHTS


@pytest.mark.parametrize(
    ("found", "limits", "expected"),
    [
        (comparison(1e-6, 1.0), NOISE["float32"], True),
        (comparison(1e-6, 1.0, difference=0.02), NOISE["float32"], False),
        (comparison(2e-5, 1.0), NOISE["float32"], False),
        (comparison(1e-6, 0.99), NOISE["float32"], False),
        (RunComparison(1, 1, 0.0, 0.0, 1.0, 1.0, 1.0), NOISE["float32"], False),
        (RunComparison(1, 1, 9.0, 0.0, 1.0, 1.0, 1.0), NOISE["bfloat16"], True),
        (comparison(0.051, 0.99), NOISE["bfloat16"], False),
        (comparison(0.04, 0.84), NOISE["bfloat16"], False),
        (comparison(0.4, 0.8), OTHER_WEIGHTS, True),
    ],
    ids=["exact", "logits", "kl", "top-1", "token", "half, token", "half, kl", "half, top-1", "other weights"],
)
def test_a_comparison_is_judged_by_every_bound(found: RunComparison, limits: VerifyBounds, expected: bool) -> None:
    assert within(found, limits) is expected


@pytest.mark.parametrize(
    ("with_prefill", "with_decode", "alone", "expected"),
    [(0.05, 0.05, 0.4, True), (0.07, 0.05, 0.4, False), (0.05, 0.07, 0.4, False), (0.05, 0.05, 0.6, False)],
    ids=["all", "hand-off and prefill", "hand-off and decode", "the two alone"],
)
def test_every_comparison_must_hold(with_prefill: float, with_decode: float, alone: float, expected: bool) -> None:
    limits = VerifyBounds(max_kl=0.06, min_top1=0.5)
    kls = (with_prefill, with_decode, alone, 0.0, 0.0)
    assert Comparisons(*(comparison(kl, 0.9) for kl in kls)).within(limits, OTHER_WEIGHTS) is expected


def test_each_comparison_is_of_its_two_runs() -> None:
    """Runs whose likeliest tokens differ at 1, 2, ... of 6 positions from the decode engine's."""

    def differing(count: int) -> EngineRun:
        return EngineRun((5,), numpy.eye(2, dtype=numpy.float32)[[1] * count + [0] * (6 - count)])

    found = Comparisons.of(Runs(*(differing(count) for count in (1, 3, 0, 4, 5))))
    six = (
        found.handoff_vs_prefill,
        found.handoff_vs_decode,
        found.prefill_vs_decode,
        found.prefill_again,
        found.decode_again,
    )
    assert [round(6 * (1 - one.top1)) for one in six] == [2, 1, 3, 1, 5]


def test_the_summary_says_how_far_the_pair_is_from_the_decode_host_and_how_far_that_is_from_itself() -> None:
    tops = {"prefill": 0.5, "decode": 0.97, "alone": 0.96, "prefill twice": 0.4, "decode twice": 0.99}
    text = summary("vllm/cuda", "mlx/gpu", 100, Comparisons(*(comparison(0.0, top1) for top1 in tops.values())))
    assert text == (
        "The pair agrees with mlx/gpu alone in 97.0% of 100 next tokens (95 % interval 91.5% to 99.0%). "
        "Two runs of mlx/gpu alone agree in 99.0%, vllm/cuda alone and mlx/gpu alone in 96.0%."
    )


@pytest.mark.parametrize(
    ("deviation", "tolerance"), [(0.0, 0.1), (0.02, 0.1), (0.1, 0.4), (0.26, 1.1), (1.5, 6.0), (1e9, 100.0)]
)
def test_audits_of_a_pair_are_bounded_by_four_times_what_its_controls_differ_by(
    deviation: float, tolerance: float
) -> None:
    assert audit_tolerance(deviation) == tolerance
