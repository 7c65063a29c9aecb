"""benchmarks/models_trace.py: the trace, and the fewest loads that any order of evictions needs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.models_trace import optimum, trace


@pytest.mark.parametrize(
    ("requests", "room", "loads"),
    [
        ("aaaa", 1, 1),
        ("abab", 1, 4),
        ("abab", 2, 2),
        ("abcabc", 2, 4),
        ("abcdabcd", 4, 4),
        ("abacab", 2, 4),
        ("", 2, 0),
    ],
)
def test_the_optimum_gives_up_the_model_that_is_needed_last(requests: str, room: int, loads: int) -> None:
    assert optimum(list(requests), room) == loads


def test_runs_of_a_trace_have_the_mean_length_and_change_the_model() -> None:
    asked = trace("abcd", 20_000, 20.0, seed=1)
    runs = 1 + sum(one != two for one, two in pairwise(asked))
    assert len(asked) == 20_000 and 18 < 20_000 / runs < 22 and set(asked) == set("abcd")
    assert trace("abcd", 50, 1.0, seed=1) != trace("abcd", 50, 1.0, seed=2)
