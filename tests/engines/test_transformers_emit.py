"""disagg/engines/transformers_emit.py: blocks hold the right rows as bytes, for as long as anyone looks at them."""

from __future__ import annotations

import gc

import pytest
import torch

from disagg.engines.transformers_emit import RowEmitter, head_views
from disagg.kv.blocks import KVBlock
from disagg.kv.layout import LayerLayout, Layout

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
    blocks: list[KVBlock] = []
    emitter = RowEmitter(layout(), 12, CPU, blocks.append)
    for start in (0, 4, 8):
        for layer in (0, 1):
            emitter(layer, start, *rows(4))
    assert [(b.layer, b.start, b.end) for b in blocks] == [(0, 0, 4), (0, 4, 8), (1, 7, 8), (0, 8, 12), (1, 8, 12)]
    assert [b.wait for b in blocks] == [None] * 5


def test_rows_of_a_sliding_layer_survive_the_reuse_of_its_memory() -> None:
    blocks: list[KVBlock] = []
    keys, values = rows(4)
    want = keys.clone()
    RowEmitter(layout(), 4, CPU, blocks.append)(1, 0, keys, values)
    keys.zero_()
    assert torch.equal(torch.frombuffer(blocks[0].keys[1], dtype=torch.float32).view(4, 4), want[0, 1])


def test_views_keep_their_memory_alive() -> None:
    blocks: list[KVBlock] = []
    keys, values = rows(4)
    want = bytes(head_views(keys[0])[0])
    RowEmitter(layout(), 4, CPU, blocks.append)(0, 0, keys, values)
    del keys, values
    gc.collect()
    torch.randn(1000, 100)
    assert bytes(blocks[0].keys[0]) == want
