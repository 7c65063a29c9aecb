"""disagg/engines/decoding/tail.py: the tails of splits leave answers their time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg.engines.decoding.tail import LEAST_TOKENS, TailPace, TailPolicy

LAYERS = 32


def run(pace: TailPace, chunks: Sequence[int], layers: int, speed: float, step_s: float) -> tuple[float, float]:
    """Compute chunks through some layers, at so many layer tokens per second, beside answers whose steps take step_s.
    Returns by which share the answers were slowed until the end of the last piece, and the longest piece."""
    now, computed, longest = 1000.0, 0.0, 0.0
    pace.begin(now)
    for chunk in chunks:
        left = chunk
        while left:
            tokens = pace.tokens(left, layers, answers=True)
            if pace.due(now, tokens, layers, answers=True):
                took = tokens * layers / speed
                pace.took(now, now + took, tokens, layers, answers=True)
                now, computed, longest, left = now + took, computed + took, max(longest, took), left - tokens
            else:
                now += step_s
    return computed / (now - 1000.0 - computed), longest


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("step_s", [0.01, 0.04])
@pytest.mark.parametrize("chunks", [1, 2, 16])
def test_answers_are_slowed_by_at_most_the_share(share: float, step_s: float, chunks: int) -> None:
    pace = TailPace(2048, LAYERS, TailPolicy(share=share))
    pace.took(0.0, 64 * LAYERS / 32_000, 64, LAYERS, answers=False)
    slowed, _ = run(pace, [512] * chunks, 8, speed=32_000, step_s=step_s)
    assert 0.6 * share < slowed <= share


def test_a_piece_that_took_longer_than_expected_is_made_up_for() -> None:
    pace = TailPace(2048, LAYERS, TailPolicy(share=0.1))
    run(pace, [512], 8, speed=64_000, step_s=0.01)
    slowed, _ = run(pace, [512] * 16, 8, speed=32_000, step_s=0.01)
    assert slowed <= 0.105


@pytest.mark.parametrize("layers", [1, 8, 31])
@pytest.mark.parametrize("speed", [20_000.0, 200_000.0, 2_000_000.0])
def test_beside_answers_no_piece_but_the_first_is_longer_than_the_policy_says(layers: int, speed: float) -> None:
    pace = TailPace(8192, LAYERS)
    run(pace, [64], layers, speed, 0.02)
    _, longest = run(pace, [1024] * 8, layers, speed, 0.02)
    assert longest <= max(pace.policy.beside_s, LEAST_TOKENS * layers / speed) * 1.001


def test_the_first_piece_is_short_whatever_the_number_of_layers() -> None:
    assert TailPace(2048, LAYERS).tokens(2048, LAYERS, answers=True) == 64
    assert TailPace(2048, LAYERS).tokens(2048, 8, answers=True) == 256


def test_without_answers_pieces_follow_each_other_and_are_longer() -> None:
    pace = TailPace(2048, LAYERS)
    pace.took(0.0, 0.1, 512, 8, answers=False)
    assert pace.due(0.1, 512, 8, answers=False)
    assert not pace.due(0.1, 512, 8, answers=True)
    assert pace.due(0.1 + pace.policy.rest_s(0.1), 512, 8, answers=True)
    pace.begin(1.0)
    assert not pace.due(0.1 + pace.policy.rest_s(0.1), 512, 8, answers=True), "of the time before it, a tail has none"
    assert pace.tokens(5000, 8, answers=False) > pace.tokens(5000, 8, answers=True)
    pace.took(1.0, 1.5, 512, 8, answers=False)
    assert pace.due(1.5 + pace.policy.rest_s(0.1), 102, 8, answers=True), "a piece that delayed none is not made up for"


def test_a_chunk_is_divided_evenly() -> None:
    pace = TailPace(512, LAYERS, speed=1e9)
    assert [pace.tokens(left, 8, answers=True) for left in (513, 512, 511, 1025, 1)] == [257, 512, 511, 342, 1]


def test_one_quick_piece_at_most_doubles_the_speed() -> None:
    pace = TailPace(8192, LAYERS)
    pace.took(0.0, 1.0, 100, 10, answers=True)
    pace.took(1.0, 1.000001, 100, 10, answers=True)
    assert pace.speed == 2000
    pace.took(2.0, 4.0, 100, 10, answers=True)
    assert pace.speed == 500
