"""What models cost: parameters, weights, KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.api.layout import LayerLayout, Layout, StateTensor
from disagg.errors import UsageError
from disagg.planning.shapes import SHAPES, matching, shape


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-3.1-8b", 8.03e9, 8.03e9 - 128256 * 4096),
        ("llama-3.3-70b", 70.6e9, 70.6e9 - 128256 * 8192),
        ("qwen3-8b", 8.19e9, 8.19e9 - 151936 * 4096),
        ("qwen3-coder-30b", 30.5e9, 3.3e9 - 151936 * 2048),
        ("qwen3-next-80b", 79.7e9, 3.9e9 - 151936 * 2048),
        ("gpt-oss-120b", 116.8e9, 5.1e9),
        ("gpt-oss-20b", 20.9e9, 3.6e9),
    ],
)
def test_parameters_are_those_of_the_model_cards(name: str, total: float, active: float) -> None:
    """Active: what one token is multiplied with, so without the embedding table that it only looks up."""
    assert shape(name).total_params == pytest.approx(total, rel=0.01)
    assert shape(name).active_params == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 8192])
def test_kv_bytes_are_those_of_the_layout_on_the_wire(name: str, tokens: int) -> None:
    sizes = SHAPES[name]
    kinds = [
        LayerLayout("state", states=(StateTensor((sum(state.nbytes for state in sizes.states) // 4,)),))
        if w == 0
        else LayerLayout("sliding" if w else "full", sizes.kv_heads, sizes.head_dim, sizes.head_dim, w)
        for w in sizes.windows
    ]
    assert sizes.layout("bfloat16").nbytes(tokens) == Layout(tuple(kinds), "bfloat16").nbytes(tokens)


def test_qwen3_coder_takes_96_kib_a_token() -> None:
    assert SHAPES["qwen3-coder-30b"].layout("bfloat16").nbytes(1) == 98304
    assert SHAPES["qwen3-coder-30b"].layout("bfloat16").nbytes(8192) == 805_306_368


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [
        ("qwen3-next-80b", 279e6, 883e6),
        ("qwen3-coder-30b", 805e6, 3.2e9),
        ("llama-3.3-70b", 2.7e9, 10.7e9),
    ],
)
def test_a_hybrid_ships_a_tenth_of_a_model_of_its_size(name: str, short: float, long: float) -> None:
    """The table of docs/architectures.md: 8,192 and 32,768 tokens in bfloat16."""
    assert SHAPES[name].layout("bfloat16").nbytes(8192) == pytest.approx(short, rel=0.01)
    assert SHAPES[name].layout("bfloat16").nbytes(32768) == pytest.approx(long, rel=0.01)


def test_packed_weights_are_counted_with_their_scales() -> None:
    assert SHAPES["gpt-oss-120b"].weight_bytes == pytest.approx(63.4e9, rel=0.01)
    assert SHAPES["llama-3.1-8b"].weight_bytes == pytest.approx(16.06e9, rel=0.01)


def test_a_batch_meets_more_experts_but_never_all() -> None:
    sizes = SHAPES["qwen3-coder-30b"]
    assert sizes.distinct_experts(1) == pytest.approx(8)
    assert 8 < sizes.distinct_experts(2) < 16
    assert sizes.distinct_experts(2048) == pytest.approx(128, rel=1e-6)
    assert replace(sizes, experts=0).distinct_experts(5) == 0


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("qwen3-coder:30b", "qwen3-coder-30b"),
        ("mlx-community/Qwen3-Coder-30B-A3B-Instruct-8bit", "qwen3-coder-30b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
    ],
)
def test_a_label_finds_its_shape(label: str, name: str) -> None:
    found = matching("", label)
    assert found is not None
    assert found.name == name


def test_a_label_that_names_no_known_model_finds_nothing() -> None:
    assert matching("tiny", "owner/model") is None


def test_an_unknown_shape_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown model shape 'llama'.*llama-3\.1-8b"):
        shape("llama")
