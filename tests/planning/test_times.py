"""When a machine would have read a prompt, and each layer's KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.api.layout import LayerLayout
from disagg.planning.devices import DEVICES
from disagg.planning.shapes import SHAPES, ModelShape
from disagg.planning.times import attended, prefill

SPARK = DEVICES["dgx-spark"]
LLAMA = SHAPES["llama-3.1-8b"]
OSS = SHAPES["gpt-oss-20b"]


def naive_pairs(start: int, end: int, window: int | None) -> int:
    return sum(min(query + 1, window or query + 1) for query in range(start, end))


@pytest.mark.parametrize("window", [None, 1, 7, 16, 100])
@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 5), (0, 40), (5, 6), (10, 30), (20, 20), (16, 17), (3, 99)])
def test_attention_looks_at_as_many_pairs_as_counting_says(start: int, end: int, window: int | None) -> None:
    assert attended(start, end, window) == naive_pairs(start, end, window)


def test_emissions_cover_every_kept_row_once_in_order() -> None:
    for shape in (LLAMA, OSS):
        plan = prefill(SPARK, shape, 1000, "float16", 256)
        for layer, window in enumerate(shape.windows):
            kept = LayerLayout("sliding" if window else "full", 1, 1, 1, window).rows(1000)
            rows = [row for e in plan.emissions if e.layer == layer for row in range(e.start, e.end)]
            assert rows == list(kept)


def test_moments_ascend_and_end_before_the_prefill_does() -> None:
    plan = prefill(SPARK, OSS, 5000, "bfloat16", 512)
    moments = [emission.at for emission in plan.emissions]
    assert moments == sorted(moments)
    assert moments[0] > 0
    assert moments[-1] < plan.seconds == plan.chunk_ends[-1]
    assert list(plan.chunk_ends) == sorted(plan.chunk_ends)
    assert len(plan.chunk_ends) == 10


def test_a_layers_kv_exists_before_its_attention_has_run() -> None:
    """Query, key and value projections are 25 of a layer's 218 million parameters."""
    plan = prefill(SPARK, LLAMA, 2048, "float16", 2048)
    layer = plan.emissions[1].at - plan.emissions[0].at
    assert 0.05 * layer < plan.emissions[0].at < 0.15 * layer


def test_flops_are_two_per_parameter_and_four_per_pair_and_width() -> None:
    exact = replace(SPARK, layer_overhead_s=0.0, prefill_fraction=1.0)
    flops = 2 * 4096 * LLAMA.layers * LLAMA.dense_params
    flops += 4 * LLAMA.layers * LLAMA.heads * LLAMA.head_dim * (4096 * 4097 // 2)
    assert prefill(exact, LLAMA, 4096, "float16", 4096).seconds == pytest.approx(flops / 125e12)


def test_chunks_cost_their_weights_and_overheads_again_but_no_flops() -> None:
    whole, parts = (prefill(SPARK, LLAMA, 4096, "float16", chunk).seconds for chunk in (4096, 512))
    assert parts - whole == pytest.approx(7 * LLAMA.layers * SPARK.layer_overhead_s)


def test_a_tiny_chunk_is_bound_by_reading_the_weights() -> None:
    weights = LLAMA.layers * LLAMA.dense_params * 2
    seconds = prefill(SPARK, LLAMA, 1, "float16", 2048).seconds - LLAMA.layers * SPARK.layer_overhead_s
    assert seconds == pytest.approx(weights / SPARK.bytes_per_s)


def test_an_empty_prompt_takes_no_time() -> None:
    plan = prefill(SPARK, LLAMA, 0, "float16", 2048)
    assert (plan.seconds, plan.emissions, plan.chunk_ends) == (0.0, (), ())


@pytest.mark.parametrize("shape", [LLAMA, SHAPES["qwen3-coder-30b"]])
def test_longer_prompts_take_longer(shape: ModelShape) -> None:
    times = [prefill(SPARK, shape, tokens, "bfloat16", 2048).seconds for tokens in (1, 2048, 2049, 8192, 32768)]
    assert times == sorted(set(times))


def test_windows_make_long_prompts_cheaper() -> None:
    full = replace(OSS, windows=(None,) * OSS.layers)
    assert prefill(SPARK, OSS, 32768, "bfloat16", 2048).seconds < prefill(SPARK, full, 32768, "bfloat16", 2048).seconds
