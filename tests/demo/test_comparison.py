import pytest

from disagg.demo.flow import Comparison

BOTH = Comparison(parallel_wall=0.5, own={"a": 0.4, "b": 0.25}, completion_tokens=100, same_text=True)


def test_running_at_once_is_compared_with_one_after_the_other_and_with_the_slower() -> None:
    assert BOTH.sequential_sum == pytest.approx(0.65)
    assert BOTH.speedup == pytest.approx(1.3)
    assert BOTH.over_slower == pytest.approx(1.25)
    assert BOTH.throughput == pytest.approx(200)


def test_json_has_the_times_and_what_follows_from_them() -> None:
    body = BOTH.to_json()
    assert (body["own_wall"], body["same_text"]) == ({"a": 0.4, "b": 0.25}, True)
    assert body["parallel_over_slower"] == BOTH.over_slower and body["speedup"] == BOTH.speedup
