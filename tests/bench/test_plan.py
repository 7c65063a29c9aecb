"""The order of turns and the times of arrivals."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from disagg.bench.plan import ArrivalPattern, RequestSpeed, arrival_times, expected_seconds, turns
from tests.bench.bench_parts import WITHOUT_SPLIT, plan, point


def test_one_request_at_a_time_the_modes_take_turns_request_by_request() -> None:
    found = [turn for turn in turns(plan((point(),), requests=4)) if not turn.warmup]
    assert [turn.mode for turn in found] == list(WITHOUT_SPLIT) * 4
    assert [(turn.first, turn.count) for turn in found if turn.mode == "disaggregated"] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
    ]


def test_warm_up_comes_first_for_every_mode_with_prompts_of_its_own() -> None:
    first = list(itertools.islice(turns(plan((point(),), requests=4, warmup=2)), 3))
    assert [(turn.mode, turn.warmup, turn.first, turn.count) for turn in first] == [
        (m, True, 4, 2) for m in WITHOUT_SPLIT
    ]


@pytest.mark.parametrize(("requests", "concurrency", "rounds"), [(64, 4, 4), (8, 4, 1), (17, 4, 2), (5, 5, 1)])
def test_a_turn_is_long_enough_to_reach_its_concurrency(requests: int, concurrency: int, rounds: int) -> None:
    made = plan((point(concurrency=concurrency),), requests=requests, warmup=0)
    mine = [turn for turn in turns(made) if turn.mode == "disaggregated"]
    assert len(mine) == rounds
    assert all(turn.count >= concurrency for turn in mine)
    assert [index for turn in mine for index in range(turn.first, turn.first + turn.count)] == list(range(requests))


def test_every_mode_runs_the_same_requests_at_every_point() -> None:
    made = plan((point(64), point(128), point(concurrency=3)), requests=12)
    for number, mode in itertools.product(range(3), WITHOUT_SPLIT):
        mine = [turn for turn in turns(made) if (turn.point, turn.mode, turn.warmup) == (number, mode, False)]
        assert sum(turn.count for turn in mine) == 12
    assert sum(turn.count for turn in turns(made)) == made.total


def test_arrivals_are_the_same_for_a_seed_and_differ_between_seeds() -> None:
    made = plan((), requests=50, seed=1)
    load = ArrivalPattern(rate=2.0)
    assert arrival_times(made, load) == arrival_times(plan((), requests=50, seed=1), load)
    assert arrival_times(made, load) != arrival_times(plan((), requests=50, seed=2), load)


def test_the_mean_rate_is_exactly_the_stated_one() -> None:
    times = arrival_times(plan((), requests=40), ArrivalPattern(rate=8.0))
    assert times == sorted(times) and times[-1] == pytest.approx(5.0)


@pytest.mark.parametrize(("burstiness", "expected"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_burstiness_is_the_shape_of_gamma_gaps(burstiness: float, expected: float) -> None:
    """The coefficient of variation of gamma gaps is 1 / sqrt(shape): 1 is Poisson."""
    assert expected == 1 / math.sqrt(burstiness)
    times = arrival_times(plan((), requests=20_000, burstiness=burstiness), ArrivalPattern(rate=10.0))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(expected, rel=0.06)


def test_all_modes_meet_the_same_arrivals_and_rounds_keep_the_gaps() -> None:
    made = plan((point(concurrency=None, rate=5.0),), requests=20, warmup=0)
    times = arrival_times(made, made.points[0].load)
    by_mode = {mode: [turn for turn in turns(made) if turn.mode == mode] for mode in WITHOUT_SPLIT}
    offsets = {mode: [turn.offsets for turn in found] for mode, found in by_mode.items()}
    assert offsets["disaggregated"] == offsets["decode-alone"] == offsets["prefill-alone"]
    ends = itertools.accumulate(offset[-1] for offset in offsets["disaggregated"])
    assert list(ends) == pytest.approx([times[turn.first + turn.count - 1] for turn in by_mode["disaggregated"]])


def test_a_traces_own_times_begin_with_its_first_request() -> None:
    made = plan((point(None, None, concurrency=None),), requests=3, rounds=1, warmup=0)
    assert [turn.offsets for turn in turns(made, (5.0, 6.0, 9.0))] == [(0.0, 1.0, 4.0)] * 3


def test_the_expected_time_scales_with_prompts_answers_and_turns() -> None:
    speeds = {
        mode: RequestSpeed(ttft_s=1.0, prompt_tokens=100, per_token_s=0.5, output_tokens=5) for mode in WITHOUT_SPLIT
    }
    one = plan((point(100, 5),), requests=4, warmup=0)
    assert expected_seconds(one, speeds) == pytest.approx(3 * 4 * 3.0)
    longer = plan((point(300, 5),), requests=4, warmup=1)
    assert expected_seconds(longer, speeds) == pytest.approx(3 * 5 * 5.0)
    four_at_a_time = plan((point(100, 5, concurrency=4),), requests=8, warmup=0)
    assert expected_seconds(four_at_a_time, speeds) == pytest.approx(3 * 2 * 3.0)
    own_lengths = plan((point(None, None, concurrency=1),), requests=1, warmup=0)
    assert expected_seconds(own_lengths, speeds) == pytest.approx(3 * 3.0)


def test_a_rate_takes_as_long_as_its_arrivals_and_the_last_answer() -> None:
    speeds = {mode: RequestSpeed(1.0, 100, 0.5, 5) for mode in WITHOUT_SPLIT}
    made = plan((point(100, 5, concurrency=None, rate=2.0),), requests=10, rounds=1, warmup=0)
    assert expected_seconds(made, speeds) == pytest.approx(3 * (10 / 2.0 + 3.0))
