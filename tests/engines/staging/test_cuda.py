"""disagg/engines/staging.py on a CUDA device: what a sender reads in pinned memory is what the GPU has computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disagg.api.layout import LayerLayout, Layout, StateTensor
from disagg.api.names import INT8, WireForm
from disagg.engines.staging import RowEmitter, filled_planes, plane_views
from tests.engines.staging.test_quantize import DTYPES, HOSTILE

ROWS, DIM = 2048, 128
FULL = LayerLayout("full", 8, DIM, DIM)
LAYOUT = Layout((FULL, LayerLayout("sliding", 8, DIM, DIM, window=ROWS)), "bfloat16")


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def sent(views: Any) -> list[bytes]:
    return [bytes(view) for view in views]


@pytest.mark.parametrize("wire", ["as-is", INT8])
@pytest.mark.parametrize("layer", [0, 1])
def test_blocks_are_the_rows_that_were_computed_before_though_the_gpu_is_still_busy(wire: WireForm, layer: int) -> None:
    """The rows are the end of a queue of work, and the next work on the same stream overwrites those of a sliding
    layer."""
    blocks: list[Any] = []
    emitter = RowEmitter(LAYOUT, ROWS, torch.device("cuda"), blocks.append, wire=wire)
    keys, values, large = on_gpu(1, 8, ROWS, DIM), on_gpu(1, 8, ROWS, DIM), on_gpu(8192, 8192)
    want = [plane_views(filled_planes(rows[0].cpu(), wire)) for rows in (keys, values)]
    computed = keys.clone(), values.clone()
    for rows in (keys, values):
        rows.zero_()
    torch.cuda.synchronize()
    for _ in range(20):
        large @ large
    for rows, result in zip((keys, values), computed, strict=True):
        rows.copy_(result)
    emitter(layer, 0, keys, values)
    if layer == 1:
        keys.zero_()
        values.zero_()
    (block,) = blocks
    block.wait()
    assert [sent(block.keys), sent(block.values)] == [sent(views) for views in want]


def test_copies_go_to_pinned_memory_and_run_beside_the_work_that_is_queued_after_them() -> None:
    blocks: list[Any] = []
    emitter = RowEmitter(LAYOUT, ROWS, torch.device("cuda"), blocks.append)
    keys, values, large = on_gpu(1, 8, ROWS, DIM), on_gpu(1, 8, ROWS, DIM), on_gpu(8192, 8192)
    torch.cuda.synchronize()
    emitter(0, 0, keys, values)
    for _ in range(50):
        large @ large
    busy = torch.cuda.Event()
    busy.record()
    blocks[0].wait()
    assert not busy.query()
    assert all(torch.frombuffer(view, dtype=torch.uint8).is_pinned() for view in (*blocks[0].keys, *blocks[0].values))


def test_a_state_is_the_one_of_its_moment_though_it_is_overwritten_at_once() -> None:
    blocks: list[Any] = []
    state = LayerLayout("state", 0, 0, 0, states=(StateTensor((16, 64, 64), "float32"),))
    emitter = RowEmitter(Layout((state,), "bfloat16"), 4, torch.device("cuda"), blocks.append)
    recurrent = torch.randn(1, 16, 64, 64, device="cuda")
    want = bytes(plane_views((recurrent[0].cpu()[None],))[0])
    emitter.state(0, (recurrent,))
    recurrent.zero_()
    blocks[0].wait()
    assert b"".join(sent(blocks[0].tensors)) == want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HOSTILE)
def test_every_bit_is_that_of_a_cpu(kind: str, dtype: str) -> None:
    rows = torch.tensor(HOSTILE[kind](2, 33, DIM)).to(getattr(torch, dtype))
    on_device = [plane.cpu() for plane in filled_planes(rows.cuda(), INT8)]
    assert sent(plane_views(on_device)) == sent(plane_views(filled_planes(rows, INT8)))
