"""Who decodes with whom: padding against another read of the weights; and the length of prompt chunks."""

from __future__ import annotations

import pytest

from disagg.api.layout import LayerLayout, Layout, StateTensor
from disagg.engines.mlx.passes import (
    CHUNK_S,
    FIRST_TOKENS,
    LEAST_TOKENS,
    ChunkLength,
    Row,
    choose_group,
    kv_growth,
)

FULL = LayerLayout("full", kv_heads=8, key_dim=64, value_dim=64)


def kv_bytes(tokens: int) -> int:
    return 10 * tokens


def short(rest: int = 100) -> Row:
    return Row(256, rest)


def long(rest: int = 100) -> Row:
    return Row(4096, rest)


PADDING = kv_bytes(4096 - 256)  # of one short row beside a long one


def test_the_first_sequence_opens_a_group() -> None:
    assert choose_group([], short(), kv_bytes, 1 << 40) is None


def test_equal_lengths_share_a_pass_however_cheap_a_pass_is() -> None:
    assert choose_group([[short()] * 15], short(), kv_bytes, 0) == 0


def test_a_short_one_joins_a_long_one_only_where_its_padding_is_cheaper_than_a_pass() -> None:
    assert choose_group([[long()]], short(), kv_bytes, PADDING) == 0
    assert choose_group([[long()]], short(), kv_bytes, PADDING - 1) is None


def test_a_long_one_brings_padding_to_all_the_short_ones() -> None:
    assert choose_group([[short()] * 15], long(), kv_bytes, 15 * PADDING) == 0
    assert choose_group([[short()] * 15], long(), kv_bytes, 15 * PADDING - 1) is None


def test_padding_adds_up_over_those_that_join_one_by_one() -> None:
    """Each alone would be cheaper than a pass; all together they are not."""
    group = [long()]
    while choose_group([group], short(), kv_bytes, 3 * PADDING) == 0:
        group.append(short())

    assert len(group) == 1 + 3


def test_rows_that_are_about_to_end_hardly_count() -> None:
    ending = [short(rest=2)] * 14

    assert choose_group([[*ending, short(rest=100)]], long(), kv_bytes, 2 * PADDING) == 0
    assert choose_group([[short(rest=100)] * 15], long(), kv_bytes, 2 * PADDING) is None


def test_padding_counts_over_the_steps_that_both_take() -> None:
    """Beside a group that ends in three steps, padding and a pass of its own last three steps both."""
    assert choose_group([[short(rest=3)] * 4], long(rest=1000), kv_bytes, 4 * PADDING) == 0
    assert choose_group([[short(rest=3)] * 4], long(rest=1000), kv_bytes, 4 * PADDING - 1) is None


def test_the_group_with_the_least_new_padding_is_taken() -> None:
    middle = Row(1024, 100)

    assert choose_group([[long()], [middle], [short()]], short(), kv_bytes, 1 << 40) == 2
    assert choose_group([[long()], [middle]], short(), kv_bytes, 1 << 40) == 1
    assert choose_group([[long()], [middle]], Row(4000, 100), kv_bytes, 1 << 40) == 0


def test_rows_of_a_window_pad_no_more_than_the_window() -> None:
    windowed = kv_growth(Layout((LayerLayout("sliding", 8, 64, 64, window=128),), "bfloat16"))

    assert choose_group([[long()]], short(), windowed, 0) == 0


def test_growth_is_that_of_the_layout_without_fixed_states() -> None:
    sliding = LayerLayout("sliding", kv_heads=2, key_dim=64, value_dim=32, window=128)
    state = LayerLayout("state", states=(StateTensor((4, 4)),))
    layout, stateful = Layout((FULL, sliding, FULL, sliding), "bfloat16"), Layout((FULL, state), "float32")
    for tokens in (1, 127, 128, 129, 5000):
        assert kv_growth(layout)(tokens) == layout.nbytes(tokens)
        assert kv_growth(stateful)(tokens) == stateful.nbytes(tokens) - 64


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
