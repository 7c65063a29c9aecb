"""disagg/engines/vllm: which rows each step of vLLM's scheduler adds, where they lie, and which rank sends them."""

from __future__ import annotations

import pytest

from disagg.api.layout import LayerLayout, Layout, StateTensor
from disagg.engines.vllm.pages import blocks_of
from disagg.engines.vllm.scheduler import PromptRows
from disagg.engines.vllm.sharding import Sharding
from disagg.errors import ModelError
from disagg.kv.parts import Coverage, Part

Steps = list[tuple[int, int]]  # (tokens computed before, tokens scheduled)
Rows = list[tuple[int, int]]


def rows_of(tokens: int, steps: Steps) -> tuple[Rows, PromptRows]:
    prompt = PromptRows(tokens)
    found = [prompt.step(computed, scheduled) for computed, scheduled in steps]
    return [(rows.start, rows.stop) for rows in found], prompt


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([(0, 300)], [(0, 300)]),
        ([(0, 128), (128, 128), (256, 44)], [(0, 128), (128, 256), (256, 300)]),
        ([(0, 100), (100, 1), (101, 199)], [(0, 100), (100, 101), (101, 300)]),
    ],
    ids=["one step", "chunks", "ragged chunks"],
)
def test_each_step_adds_its_rows_once(steps: Steps, expected: Rows) -> None:
    rows, prompt = rows_of(300, steps)
    assert (rows, prompt.complete) == (expected, True)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [([(128, 172)], [(0, 300)]), ([(256, 20), (276, 24)], [(0, 276), (276, 300)])],
    ids=["partial", "nearly all"],
)
def test_the_first_step_also_has_the_rows_of_a_cached_prefix(steps: Steps, expected: Rows) -> None:
    rows, prompt = rows_of(300, steps)
    assert (rows, prompt.complete) == (expected, True)


def test_after_a_preemption_no_row_comes_twice() -> None:
    rows, prompt = rows_of(300, [(0, 128), (128, 64), (0, 128), (128, 128), (256, 44)])
    assert rows == [(0, 128), (128, 192), (192, 192), (192, 256), (256, 300)]
    assert prompt.complete


def test_after_a_preemption_a_prefix_that_another_prompt_has_computed_meanwhile_is_sent_too() -> None:
    rows, _ = rows_of(300, [(0, 100), (256, 44)])
    assert rows == [(0, 100), (100, 300)]


def test_tokens_of_the_answer_add_no_rows() -> None:
    rows, prompt = rows_of(10, [(0, 12), (12, 1)])
    assert rows == [(0, 10), (10, 10)]
    assert prompt.complete


@pytest.mark.parametrize(
    ("rows", "table", "blocks"),
    [
        (range(126, 130), [7, 3], [7, 3]),
        (range(128), [7, 3], [7]),
        (range(128, 256), [7, 3], [3]),
        (range(260, 262), [0, 0, 9], [9]),
    ],
)
def test_rows_lie_in_the_blocks_of_the_table(rows: range, table: list[int], blocks: list[int]) -> None:
    assert blocks_of(rows, table, 128) == blocks


@pytest.mark.parametrize(
    ("rows", "table", "row"),
    [
        (range(120, 130), [0, 3], 120),
        (range(120, 130), [3, 0], 128),
        (range(250, 260), [1, 3], 256),
        (range(600, 610), [1, 3], 600),
    ],
)
def test_a_row_whose_block_was_given_up_is_refused(rows: range, table: list[int], row: int) -> None:
    with pytest.raises(ModelError, match=f"block of row {row} before"):
        blocks_of(rows, table, 128)


@pytest.mark.parametrize(
    ("stages", "ranks", "heads", "parts"),
    [
        (1, 1, 8, 1), (1, 2, 8, 2), (1, 8, 8, 8), (1, 4, 2, 2), (1, 8, 1, 1),
        (2, 1, 8, 2), (2, 2, 8, 4), (3, 4, 2, 6), (2, 8, 1, 2),
    ],
)  # fmt: skip
def test_the_parts_of_all_ranks_are_the_layout_exactly_once(stages: int, ranks: int, heads: int, parts: int) -> None:
    layout = Layout((LayerLayout("full", heads, 4, 4), LayerLayout("sliding", heads, 4, 4, window=8)) * 3, "float32")
    sharding = Sharding.of(layout, ranks, stages)
    owned = [range(6)[stage * 6 // stages : (stage + 1) * 6 // stages] for stage in range(stages)]
    sent = [part for own in owned for rank in range(ranks) if (part := sharding.part(rank, own)) is not None]
    assert len(sent) == sharding.parts == parts
    coverage = Coverage(layout)
    for part in sent:
        coverage.add(part)
    coverage.require_complete()


def test_latent_attention_is_sent_by_the_first_rank_alone() -> None:
    sharding = Sharding.of(Layout((LayerLayout("full", 1, 512, 64),) * 2, "float32"), 4)
    assert [sharding.part(rank, range(2)) for rank in range(4)] == [Part(), None, None, None]


@pytest.mark.parametrize(("heads", "ranks"), [(2, 2), (1, 2), (2, 4)])
def test_states_are_sent_whole_by_the_first_rank_of_those_that_share_the_heads(heads: int, ranks: int) -> None:
    state = LayerLayout("state", states=(StateTensor((2, 3)),))
    layout = Layout((state, LayerLayout("full", heads, 4, 4), state), "float32")
    sharding = Sharding.of(layout, ranks)
    coverage = Coverage(layout)
    for rank in range(ranks):
        if (part := sharding.part(rank, range(3))) is not None:
            assert part.states == (rank == 0)
            coverage.add(part)
    coverage.require_complete()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_of_states_alone_is_sent_by_the_first_rank(ranks: int) -> None:
    layout = Layout((LayerLayout("state", states=(StateTensor((3, 8)), StateTensor((4, 2, 2)))),) * 2, "float32")
    sharding = Sharding.of(layout, ranks)
    assert [sharding.part(rank, range(2)) for rank in range(ranks)] == [Part(), None][:ranks]
    assert sharding.parts == 1


def test_a_pipeline_with_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"pipeline_parallel = 3 is more than the model's 2 layers"):
        Sharding.of(Layout((LayerLayout("full", 2, 4, 4),) * 2, "float32"), 1, 3)


@pytest.mark.parametrize(("ranks", "heads"), [(3, 8), (2, 3), (3, 2)])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks: int, heads: int) -> None:
    with pytest.raises(ModelError, match=f"tensor_parallel = {ranks} does not divide the model's {heads} KV heads"):
        Sharding.of(Layout((LayerLayout("full", heads, 4, 4),), "float32"), ranks)


def test_layers_with_different_numbers_of_heads_are_read_with_one_rank_only() -> None:
    few, many = LayerLayout("full", 2, 4, 4), LayerLayout("sliding", 8, 4, 4, window=8)
    alone = Sharding.of(Layout((many, few), "float32"), 1)
    assert [alone.heads_of(layer) for layer in (many, few)] == [8, 2]
    assert [Sharding.of(Layout((layer,), "float32"), 4).heads_of(layer) for layer in (many, few)] == [2, 1]
    with pytest.raises(ModelError, match="different numbers of KV heads: 2, 8") as refused:
        Sharding.of(Layout((many, few), "float32"), 2)
    assert refused.value.hint.startswith("set tensor_parallel = 1")


@pytest.mark.parametrize(
    ("ranks", "stages", "heads", "times"), [(1, 1, 8, 1), (2, 1, 8, 2), (2, 1, 1, 1), (8, 2, 2, 4)]
)
def test_pages_that_hold_copies_of_a_head_are_no_room_for_other_prompts(
    ranks: int, stages: int, heads: int, times: int
) -> None:
    layout = Layout((LayerLayout("full", heads, 4, 4),) * 2, "float32")
    assert Sharding.of(layout, ranks, stages).kv_bytes(100) == 100 * times
