"""The length of prompt chunks."""

from __future__ import annotations

import pytest

from disagg.engines.mlx.batching.chunk import CHUNK_S, FIRST_TOKENS, LEAST_TOKENS, ChunkLength


def test_the_first_chunk_of_a_model_of_unknown_speed_is_short() -> None:
    assert ChunkLength(2048).length(1) == FIRST_TOKENS
    assert ChunkLength(100).length(1) == 100


@pytest.mark.parametrize(
    ("seconds", "tokens"),
    [
        (CHUNK_S, FIRST_TOKENS),
        (CHUNK_S * 2, FIRST_TOKENS // 2),
        (CHUNK_S / 1.5, FIRST_TOKENS * 3 // 2),
        (CHUNK_S / 100, FIRST_TOKENS * 2),
        (CHUNK_S * 100, LEAST_TOKENS),
        (0.0, FIRST_TOKENS * 2),
    ],
)
def test_the_next_chunk_is_as_long_as_the_time_of_a_chunk_allows(seconds: float, tokens: int) -> None:
    chunk = ChunkLength(2048)
    chunk.took(seconds)
    assert chunk.length(1) == tokens


def test_a_fast_engine_comes_to_the_longest_chunk_and_not_beyond() -> None:
    chunk = ChunkLength(2048)
    for _ in range(5):
        chunk.took(0.01)
    assert chunk.length(1) == 2048


def test_prompts_side_by_side_share_a_chunk_but_each_gets_a_least_length() -> None:
    chunk = ChunkLength(1024)
    assert [chunk.length(prompts) for prompts in (0, 1, 2, 4, 100)] == [512, 512, 256, 128, LEAST_TOKENS]
    assert ChunkLength(32).length(8) == 32
