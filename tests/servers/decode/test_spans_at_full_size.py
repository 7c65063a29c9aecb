"""What a plan is worth at full size: speeds and times are those of the device model, as measured of whole prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.split_simulated import PAIRS, pair_of, planned, takes
from disagg.planning.split import best_split


@pytest.mark.parametrize("tokens", [8192, 32768])
@pytest.mark.parametrize("gbit", [2.5, 10.0])
@pytest.mark.parametrize("name", PAIRS)
def test_a_plan_takes_hardly_more_than_the_quickest_division(
    tmp_path: Path, name: str, gbit: float, tokens: int
) -> None:
    pair = pair_of(name, gbit, tokens, tmp_path)
    plan = planned(pair, tokens)
    assert plan.divided
    assert takes(pair, tokens, plan.layers) <= 1.04 * best_split(pair, tokens - 1).seconds


@pytest.mark.parametrize("gbit", [2.5, 10.0])
@pytest.mark.parametrize("name", PAIRS)
def test_a_short_prompt_is_never_slower_than_the_better_of_hand_off_and_local(
    tmp_path: Path, name: str, gbit: float
) -> None:
    for tokens in (512, 2048):
        pair = pair_of(name, gbit, tokens, tmp_path)
        ends = [takes(pair, tokens, layers) for layers in (0, pair.shape.layers)]
        assert takes(pair, tokens, planned(pair, tokens).layers) <= 1.01 * min(ends), tokens
