"""What is sent: exact counts, valid ids, the same every time."""

from __future__ import annotations

import pytest

from disagg.bench.workloads import LengthTrace, RandomTokens, TextItem, Texts, TraceRow, WorkloadItem
from tests.bench.bench_parts import point

ROWS = [TraceRow(0, 700, 10, (1, 2)), TraceRow(500, 1100, 20, (1, 2, 3)), TraceRow(900, 512, 5, (9,))]


@pytest.mark.parametrize("count", [1, 511, 4096])
def test_random_prompts_have_exactly_as_many_tokens_as_the_point_says(count: int) -> None:
    item = RandomTokens(640).item(point(count, 7), "disaggregated", 3)
    assert item.tokens is not None and len(item.tokens) == count and item.output_tokens == 7


def test_random_ids_are_all_in_the_vocabulary_and_reach_over_it() -> None:
    tokens = RandomTokens(640).item(point(20_000), "disaggregated", 0).tokens
    assert tokens is not None and set(tokens) == set(range(640))


def test_a_seed_repeats_its_prompts() -> None:
    first, again, other = (RandomTokens(640, seed).item(point(), "disaggregated", 0) for seed in (1, 1, 2))
    assert first == again != other


def test_no_two_requests_share_a_prefix_not_even_those_of_two_modes() -> None:
    workload = RandomTokens(50_000)
    items = [
        workload.item(point(), mode, index).tokens for mode in ("disaggregated", "decode-alone") for index in range(50)
    ]
    assert len({tokens[:2] for tokens in items if tokens}) == 100


def test_every_request_ignores_the_end_of_sequence_and_has_its_exact_length() -> None:
    assert WorkloadItem(9, tokens=(1, 2)).request() == {"tokens": (1, 2), "max_tokens": 9, "ignore_eos": True}
    assert WorkloadItem(9, text="hello").request() == {"prompt": "hello", "max_tokens": 9, "ignore_eos": True}


def test_texts_go_round_and_may_state_their_own_answer_length() -> None:
    workload = Texts([TextItem("a"), TextItem("b", 3)], "prompts")
    assert [workload.item(point(None, 8), "disaggregated", index) for index in range(3)] == [
        WorkloadItem(8, text="a"),
        WorkloadItem(3, text="b"),
        WorkloadItem(8, text="a"),
    ]


def test_a_trace_has_the_lengths_and_times_of_its_rows() -> None:
    trace = LengthTrace(ROWS, 640, "trace")
    items = [trace.item(point(None, None), "disaggregated", index) for index in range(3)]
    assert [(len(item.tokens or ()), item.output_tokens) for item in items] == [(700, 10), (1100, 20), (512, 5)]
    assert trace.times == (0.0, 0.5, 0.9)


def test_equal_hash_ids_are_equal_blocks_of_512_tokens_and_others_differ() -> None:
    trace = LengthTrace(ROWS, 640, "trace")
    first, second, third = (trace.item(point(None, None), "disaggregated", index).tokens or () for index in range(3))
    assert first == second[:700] and first[:512] != first[512:] + second[700:1024]
    assert third != first[:512]


def test_a_traces_blocks_of_one_mode_warm_no_cache_for_another() -> None:
    trace = LengthTrace(ROWS, 640, "trace")
    one, other = (trace.item(point(None, None), mode, 0).tokens for mode in ("disaggregated", "decode-alone"))
    assert one != other
