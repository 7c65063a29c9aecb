"""disagg/engines/staging.py: blocks hold the right rows as bytes, for as long as anyone looks at them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from disagg.api.layout import LayerLayout, Layout
from disagg.api.names import INT8, WireForm
from disagg.engines.staging import RowEmitter, filled_planes, head_views, plane_views

CPU = torch.device("cpu")


def layout(dtype: str = "float32") -> Layout:
    full = LayerLayout("full", kv_heads=2, key_dim=4, value_dim=3)
    return Layout((full, LayerLayout("sliding", kv_heads=2, key_dim=4, value_dim=3, window=5)), dtype)


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_views_show_the_bytes_of_each_head_of_a_strided_tensor(dtype: torch.dtype) -> None:
    buffer = torch.randn(2, 10, 4).to(dtype)
    views = head_views(buffer[:, 3:7])
    for head, view in enumerate(views):
        assert view.contiguous and view.format == "B" and view.nbytes == 4 * 4 * dtype.itemsize
        assert torch.equal(torch.frombuffer(view, dtype=dtype).view(4, 4), buffer[head, 3:7])


def test_only_the_rows_that_the_layout_keeps_are_emitted() -> None:
    blocks: list[Any] = []
    emitter = RowEmitter(layout(), 12, CPU, blocks.append)
    for start in (0, 4, 8):
        for layer in (0, 1):
            emitter(layer, start, *rows(4))
    assert [(b.layer, b.start, b.end) for b in blocks] == [(0, 0, 4), (0, 4, 8), (1, 7, 8), (0, 8, 12), (1, 8, 12)]
    assert [b.wait for b in blocks] == [None] * 5


@pytest.mark.parametrize(
    ("layer", "rows", "start", "expected"),
    [
        (0, range(128), 0, range(128)),
        (0, range(128), 100, range(100, 128)),
        (0, range(96), 100, range(0)),
        (1, range(128), 0, range(0)),
        (1, range(128, 256), 0, range(236, 256)),
        (1, range(256, 300), 0, range(256, 300)),
        (1, range(128, 256), 290, range(0)),
        (1, range(256, 300), 290, range(290, 300)),
    ],
)
def test_rows_that_will_not_be_emitted_need_not_be_read(layer: int, rows: range, start: int, expected: range) -> None:
    full, sliding = LayerLayout("full", 2, 32, 32), LayerLayout("sliding", 2, 32, 32, window=64)
    emitter = RowEmitter(Layout((full, sliding), "float32"), 300, CPU, lambda block: None, start=start)
    assert emitter.wanted(layer, rows) == expected  # ranges without a row are equal


def test_rows_of_a_sliding_layer_survive_the_reuse_of_its_memory() -> None:
    blocks: list[Any] = []
    keys, values = rows(4)
    want = keys.clone()
    RowEmitter(layout(), 4, CPU, blocks.append)(1, 0, keys, values)
    keys.zero_()
    assert torch.equal(torch.frombuffer(blocks[0].keys[1], dtype=torch.float32).view(4, 4), want[0, 1])


def test_quantised_rows_are_ready_once_they_were_waited_for_and_not_made_before() -> None:
    blocks: list[Any] = []
    layers = (LayerLayout("full", 2, key_dim=64, value_dim=3), LayerLayout("sliding", 2, 64, 128, window=5))
    emitter = RowEmitter(Layout(layers, "float32"), 4, CPU, blocks.append, wire=INT8)
    keys, values, wide = torch.randn(1, 2, 4, 64), torch.randn(1, 2, 4, 3), torch.randn(1, 2, 4, 128)
    emitter(0, 0, keys, values)
    emitter(1, 0, keys, wide)
    want = [plane_views(filled_planes(rows[0], INT8)) for rows in (keys, values, keys, wide)]
    values_of_full = blocks[0].values
    assert bytes(values_of_full[0]) == bytes(head_views(values[0])[0])  # three elements make no group: as they are
    assert [bytes(view) for view in blocks[0].keys] != [bytes(view) for view in want[0]]
    wide.zero_()  # a sliding layer's memory is used again before the sender comes to its rows
    for block in blocks:
        assert block.wait is not None
        block.wait()
    made = [blocks[0].keys, blocks[0].values, blocks[1].keys, blocks[1].values]
    assert [[bytes(view) for view in views] for views in made] == [[bytes(view) for view in views] for views in want]


@pytest.mark.parametrize("wire", ["as-is", INT8])
def test_rows_that_are_yet_to_be_filled_are_filled_once_and_before_they_are_quantised(wire: WireForm) -> None:
    blocks: list[Any] = []
    filled: list[None] = []
    layer = LayerLayout("full", 2, key_dim=64, value_dim=64)
    keys, values, source = torch.zeros(1, 2, 4, 64), torch.zeros(1, 2, 4, 64), torch.randn(1, 2, 4, 64)

    def fill() -> None:
        filled.append(None)
        keys.copy_(source)

    RowEmitter(Layout((layer,), "float32"), 4, CPU, blocks.append, wire=wire, copied=True)(0, 0, keys, values, fill)
    assert not filled and blocks[0].wait is not None
    blocks[0].wait()
    assert len(filled) == 1
    assert [bytes(view) for view in blocks[0].keys] == [
        bytes(view) for view in plane_views(filled_planes(source[0], wire))
    ]


def test_a_layout_without_a_group_has_nothing_to_wait_for() -> None:
    blocks: list[Any] = []
    RowEmitter(layout(), 4, CPU, blocks.append, wire=INT8)(0, 0, *rows(4))
    assert blocks[0].wait is None


def test_views_keep_their_memory_alive() -> None:
    blocks: list[Any] = []
    keys, values = rows(4)
    want = bytes(head_views(keys[0])[0])
    RowEmitter(layout(), 4, CPU, blocks.append)(0, 0, keys, values)
    del keys, values
    gc.collect()
    torch.randn(1000, 100)
    assert bytes(blocks[0].keys[0]) == want
