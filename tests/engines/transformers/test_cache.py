"""disagg/engines/transformers/cache.py against transformers' own cache layers, row by row."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from disagg.api.layout import LayerLayout, Layout, SplitLayout
from disagg.engines.transformers.cache import CachePlan, PreallocatedCache
from disagg.errors import ModelError
from tests.values import present

FULL = LayerLayout("full", kv_heads=2, key_dim=4, value_dim=3)
CPU = torch.device("cpu")


def sliding(window: int) -> LayerLayout:
    return LayerLayout("sliding", kv_heads=2, key_dim=4, value_dim=3, window=window)


def plan(layout: Layout) -> CachePlan:
    """That of a model each of whose layers keeps something."""
    layers = len(layout.layers)
    return CachePlan(layout, SplitLayout(layers, tuple(range(layers)), 8))


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 3)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 100])
@pytest.mark.parametrize("chunks", [[1], [7, 7, 7, 2], [3] * 12, [20, 1, 1, 1, 1], [1] * 30, [5, 8, 1]])
def test_attention_sees_the_rows_that_transformers_own_layer_shows(window: int | None, chunks: list[int]) -> None:
    torch.manual_seed(0)
    layer = FULL if window is None else sliding(window)
    theirs = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    mine = PreallocatedCache(plan(Layout((layer,), "float32")), sum(chunks), max(chunks), CPU)
    for count in chunks:
        keys, values = rows(count)
        if window != 1:  # transformers keeps all rows for a window of one: its slice [-0:] is everything
            assert mine.get_mask_sizes(count, 0) == theirs.get_mask_sizes(count)
            for got, want in zip(mine.update(keys, values, 0), theirs.update(keys, values), strict=True):
                assert torch.equal(got, want)
        else:
            assert mine.get_mask_sizes(count, 0) == (count, mine.get_seq_length())
            assert torch.equal(mine.update(keys, values, 0)[0], keys)
    assert mine.get_seq_length() == sum(chunks)


def test_memory_is_allocated_once() -> None:
    cache = PreallocatedCache(plan(Layout((FULL, sliding(4)), "float32")), 64, 8, CPU)
    before = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    for _ in range(8):
        for index in (0, 1):
            cache.update(*rows(8), index)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == before
    assert [layer.keys.shape[2] for layer in cache.layers] == [64, 4 - 1 + 8]


def test_new_rows_are_reported_as_they_are_stored() -> None:
    events: list[tuple[int, int, torch.Tensor]] = []
    layout = Layout((FULL, sliding(4)), "float32")
    cache = PreallocatedCache(
        plan(layout), 10, 6, CPU, lambda *event: events.append((event[0], event[1], event[2].clone()))
    )
    first, second = rows(6), rows(4)
    for keys, values in (first, second):
        for index in (0, 1):
            cache.update(keys, values, index)
    assert [event[:2] for event in events] == [(0, 0), (1, 0), (0, 6), (1, 6)]
    assert all(torch.equal(event[2], (first if event[1] == 0 else second)[0]) for event in events)


# window, chunks -> after how many tokens a snapshot at their end can be used
USABLE_FROM = [
    (4, [10], 0),
    (4, [4], 0),
    (100, [40, 40, 20], 0),
    (100, [40, 40, 40], 0),
    (100, [40, 40, 40, 40, 40, 40], 240 - 64),
    (4, [200], 200 - 64),
    (4, [200, 4], 201),
]


@pytest.mark.parametrize(("window", "chunks", "usable_from"), USABLE_FROM)
def test_a_snapshot_can_be_used_while_it_has_a_whole_window(window: int, chunks: list[int], usable_from: int) -> None:
    cache = PreallocatedCache(plan(Layout((FULL, sliding(window)), "float32")), sum(chunks), max(chunks), CPU)
    for count in chunks:
        cache.update(*rows(count), 1)
    snapshot = present(cache.snapshot())
    assert snapshot.usable_from == usable_from
    first, last = present(snapshot.layers[1])[0].shape[2], sum(chunks)
    assert usable_from == 0 or last - first == usable_from - window


def test_rows_of_another_shape_or_dtype_than_the_layouts_are_refused() -> None:
    cache = PreallocatedCache(plan(Layout((FULL,), "float32")), 8, 8, CPU)
    with pytest.raises(ModelError, match=r"keys of shape \(1, 3, 2, 4\)"):
        cache.update(torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2, 3), 0)
    with pytest.raises(ModelError, match=r"values.*float16"):
        cache.update(torch.zeros(1, 2, 2, 4), torch.zeros(1, 2, 2, 3, dtype=torch.float16), 0)
