"""Known records -> known figures."""

from __future__ import annotations

import json
import random
import statistics

import numpy as np
import pytest

from disagg.bench import stats
from tests.bench.bench_parts import failed, metrics, record

VLLM_KEYS = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    *(
        f"{what}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for what in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    ),
}


def test_every_key_of_vllm_bench_serve_is_there_and_is_json() -> None:
    figures = stats.summary([record()], 1.0).to_json()
    assert set(figures) >= VLLM_KEYS
    assert json.loads(json.dumps(figures)) == figures


def test_percentiles_are_those_of_numpy() -> None:
    dice = random.Random(1)
    for size in (1, 2, 5, 100):
        values = [dice.expovariate(1.0) for _ in range(size)]
        for percent in (0, 50, 90, 95, 99, 100):
            assert stats.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        stats.percentile([], 50)


def test_mean_median_and_population_deviation_are_in_milliseconds() -> None:
    spread = stats.spread([0.1, 0.2, 0.6])
    assert spread.mean == pytest.approx(300)
    assert spread.median == spread.p50 == pytest.approx(200)
    assert spread.std == pytest.approx(float(np.std([100, 200, 600])))


def test_tpot_is_the_time_after_the_first_token_per_further_token() -> None:
    assert stats.tpot(metrics(ttft=0.2, e2e=1.0, output=5)) == pytest.approx(0.2)


def test_one_output_token_has_no_tpot() -> None:
    figures = stats.summary([record(0.2, 0.2, itl=(), output=1)], 1.0)
    assert figures.tpot.mean is None and figures.itl.p99 is None
    assert figures.ttft.mean == pytest.approx(200)


def test_itl_pools_the_gaps_of_all_requests() -> None:
    figures = stats.summary([record(itl=[0.1, 0.1, 0.1]), record(itl=[0.5])], 1.0)
    assert figures.itl.mean == pytest.approx(200)
    assert figures.itl.median == pytest.approx(100)


def test_throughput_counts_what_completed_over_the_time_the_turns_took() -> None:
    figures = stats.summary([record(prompt=100, output=5), record(prompt=300, output=15), failed()], 4.0)
    assert (figures.completed, figures.failed) == (2, 1)
    assert (figures.total_input_tokens, figures.total_output_tokens) == (400, 20)
    assert figures.request_throughput == 0.5
    assert figures.output_throughput == 5.0
    assert figures.total_token_throughput == 105.0


def test_failures_are_counted_by_kind_and_leave_latencies_alone() -> None:
    figures = stats.summary([record(0.1), failed("Overloaded"), failed("Overloaded"), failed("PeerLost")], 1.0)
    assert figures.errors_by_kind == {"Overloaded": 2, "PeerLost": 1}
    assert figures.ttft.mean == pytest.approx(100)


def test_where_nothing_completed_latencies_are_unknown_not_zero() -> None:
    figures = stats.summary([failed()], 1.0)
    assert figures.ttft.median is None and figures.e2el.mean is None
    assert figures.request_throughput == 0 and figures.mean_ttft_parts_ms["prefill"] is None


def test_goodput_counts_requests_within_every_limit() -> None:
    records = [record(0.1, 0.5), record(0.3, 0.7), record(0.1, 2.1)]
    assert stats.summary(records, 2.0, {"ttft": 200}).request_goodput == 1.0
    assert stats.summary(records, 2.0, {"ttft": 200, "tpot": 200}).request_goodput == 0.5
    assert stats.summary(records, 2.0, {"e2el": 50}).request_goodput == 0.0


def test_a_limit_holds_at_its_own_value_and_a_failure_is_never_good() -> None:
    assert stats.summary([record(0.25), failed()], 1.0, {"ttft": 250}).request_goodput == 1.0


def test_goodput_without_limits_is_unknown() -> None:
    assert stats.summary([record()], 1.0).request_goodput is None


def test_a_single_output_token_meets_any_limit_on_tpot() -> None:
    assert stats.meets(record(0.2, 0.2, itl=(), output=1), {"tpot": 0.001, "itl": 0.001})


def test_the_mean_parts_of_ttft_add_up_to_its_mean() -> None:
    figures = stats.summary([record(0.1), record(0.3)], 1.0)
    assert sum(part or 0.0 for part in figures.mean_ttft_parts_ms.values()) == pytest.approx(figures.ttft.mean)


def test_the_transfer_and_what_decode_computed_are_summed_up() -> None:
    one = record(hidden_transfer=0.01, exposed_transfer=0.002, kv_bytes=1000, decode_computed_tokens=1)
    two = record(
        hidden_transfer=0.03, exposed_transfer=0.004, kv_bytes=3000, decode_computed_tokens=1, kv_wire="int8-g64"
    )
    figures = stats.summary([one, two], 1.0)
    assert figures.mean_hidden_transfer_ms == pytest.approx(20)
    assert figures.mean_exposed_transfer_ms == pytest.approx(3)
    assert (figures.total_kv_bytes, figures.decode_computed_tokens) == (4000, 2)
    assert figures.quantised_kv_requests == 1


def test_fallbacks_are_counted_apart() -> None:
    assert stats.summary([record(), record(method="fallback")], 1.0).fallbacks == 1


def test_a_ratio_of_medians_holds_its_value_between_its_ends() -> None:
    dice = random.Random(2)
    above = [2.0 + dice.gauss(0, 0.1) for _ in range(30)]
    below = [1.0 + dice.gauss(0, 0.1) for _ in range(30)]
    interval = stats.ratio_of_medians(above, below)
    assert interval.value == statistics.median(above) / statistics.median(below)
    assert 1.75 < interval.low < interval.value < interval.high < 2.25


def test_the_interval_narrows_with_more_samples_and_repeats_exactly() -> None:
    dice = random.Random(3)
    values = [1.0 + dice.gauss(0, 0.2) for _ in range(200)]
    few, many = (stats.ratio_of_medians(values[:n], values[-n:]) for n in (8, 100))
    assert many.high - many.low < few.high - few.low
    assert stats.ratio_of_medians(values[:8], values[-8:]) == few


def test_about_nineteen_in_twenty_intervals_hold_the_truth() -> None:
    dice = random.Random(4)
    held = 0
    for trial in range(60):
        above, below = ([dice.gauss(1.0, 0.1) for _ in range(15)] for _ in range(2))
        interval = stats.ratio_of_medians(above, below, seed=trial)
        held += interval.low <= 1.0 <= interval.high
    assert held >= 53
