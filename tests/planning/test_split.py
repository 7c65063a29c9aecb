"""What a prompt takes that both machines compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.planning.devices import DEVICES
from disagg.planning.shapes import SHAPES
from disagg.planning.split import PredictedSplit, SplitPair, best_split, ideal_s, split
from disagg.planning.times import Link, prefill, ship

SPARK, ULTRA = DEVICES["dgx-spark"], DEVICES["m3-ultra"]
FAST = Link(10_000.0, latency_s=0.0)


def pair(shape: str = "llama-3.1-8b", *, chunk: int = 512, link: Link = FAST) -> SplitPair:
    return SplitPair(SHAPES[shape], SPARK, ULTRA, link, "bfloat16", chunk)


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "gpt-oss-20b", "qwen3-next-80b"])
def test_no_layer_of_the_head_is_the_decode_host_alone(shape: str) -> None:
    alone = prefill(ULTRA, SHAPES[shape], 3000, "bfloat16", 512)
    here = split(pair(shape), 3000, 0)
    assert here.seconds == pytest.approx(alone.seconds)
    assert (here.head_s, here.nbytes) == (0.0, 0.0)


@pytest.mark.parametrize("gbit", [1.0, 2.5, 10.0])
def test_all_layers_of_the_head_are_a_hand_off(gbit: float) -> None:
    link = Link(gbit)
    reading = prefill(SPARK, SHAPES["llama-3.1-8b"], 4096, "bfloat16", 512)
    transfer = ship(reading, SHAPES["llama-3.1-8b"], "bfloat16", link)
    whole = split(pair(link=link), 4096, 32)
    assert whole.nbytes == transfer.nbytes
    assert whole.seconds == pytest.approx(reading.seconds + transfer.exposed_s, abs=3 * link.latency_s)


def test_a_split_sends_its_layers_rows_and_the_hidden_states() -> None:
    tokens, row, hidden = 4096, 2 * 8 * 128 * 2, 4096 * 2
    assert split(pair(), tokens, 25).nbytes == tokens * (25 * row + hidden)


def test_sliding_layers_send_the_window_of_each_chunk() -> None:
    oss = SHAPES["gpt-oss-20b"]
    row, hidden = 2 * oss.kv_heads * oss.head_dim * 2, oss.hidden * 2
    first_two = split(pair("gpt-oss-20b", chunk=512), 2048, 2)
    assert oss.windows[:2] == (128, None)
    assert first_two.nbytes == row * (4 * 128 + 2048) + 2048 * hidden


def test_states_of_the_head_are_sent_once() -> None:
    shape = SHAPES["qwen3-next-80b"]
    states = sum(state.nbytes for state in shape.states)
    one, two = (split(pair("qwen3-next-80b"), tokens, 1).nbytes for tokens in (2048, 4096))
    assert one == 2048 * shape.hidden * 2 + states
    assert two - one == 2048 * shape.hidden * 2


def test_the_tail_adds_one_chunk_to_a_balanced_split() -> None:
    """Two machines of one kind, half the layers each, no attention to speak of: n chunks take n + 1 steps."""
    short = replace(SHAPES["llama-3.1-8b"], heads=1, kv_heads=1)
    equal = SplitPair(short, SPARK, SPARK, FAST, "bfloat16", 512)
    alone = prefill(SPARK, short, 4096, "bfloat16", 512).seconds
    assert split(equal, 4096, 16).seconds == pytest.approx(alone / 2 * 9 / 8, rel=0.002)


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-coder-30b", "gpt-oss-120b"])
def test_a_split_of_a_long_prompt_is_nearly_ideal_and_beats_both_of_its_ends(shape: str) -> None:
    quick = pair(shape, chunk=1024)
    best = best_split(quick, 16384)
    ends = [split(quick, 16384, layers).seconds for layers in (0, quick.shape.layers)]
    assert ideal_s(quick, 16384) <= best.seconds < 1.05 * ideal_s(quick, 16384)
    assert best.seconds < 0.95 * min(ends)


def test_two_machines_that_differ_give_the_sum_of_their_speeds() -> None:
    """The published figures of a DGX Spark and an M3 Ultra: 8,192 tokens in 1.16 s, less what fills the pipe."""
    least = ideal_s(pair(chunk=512), 8192)
    assert 1.16 < least < 1.16 * (1 + 1.5 * 512 / 8192)


def test_a_prompt_of_one_chunk_is_computed_by_the_quicker_machine() -> None:
    one_chunk = pair(chunk=2048)
    assert ideal_s(one_chunk, 2048) == pytest.approx(split(one_chunk, 2048, 32).seconds, rel=0.01)
    assert best_split(one_chunk, 2048).layers == 32


def test_a_slower_link_moves_layers_to_the_decode_host() -> None:
    chosen = [best_split(pair(link=Link(gbit)), 8192) for gbit in (0.1, 1.0, 2.5, 10.0)]
    layers = [one.layers for one in chosen]
    assert layers == sorted(layers)
    assert layers[0] == 0 < layers[1] < layers[-1] < 32


def test_no_prompt_takes_no_time() -> None:
    assert ideal_s(pair(), 0) == 0.0
    assert split(pair(), 0, 16) == PredictedSplit(16, 0.0, 0.0, 0.0, 0.0)
