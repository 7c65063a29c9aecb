"""disagg/engines/vllm/worker.py: rows out of pages into shipments; what fails in it ends one prompt, unraised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg.api.delivery import KVOrder, KVProgress
from disagg.engines.vllm.scheduler import Begun, PromptPiece, StepOrders
from disagg.engines.vllm.worker import WorkerSide
from disagg.errors import DisaggError, HandoffError, ModelError
from disagg.kv.blocks import KVBlock
from tests import tiny_models
from tests.engines.vllm.test_scheduler import ORDER

BLOCKS, SIZE, HEADS, DIM = 8, 4, 2, 16
LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(3)]


class FakeShipment:
    """Keeps what it is given."""

    def __init__(self, order: KVOrder, header: Any) -> None:
        self.blocks: list[KVBlock] = []
        self.failures: list[DisaggError] = []
        self.steps: list[KVProgress] = []
        self.ended_steps = 0
        self.finished = False

    def step(self, progress: KVProgress) -> None:
        self.steps.append(progress)

    def end_step(self) -> None:
        self.ended_steps += 1

    def send(self, block: KVBlock) -> None:
        assert block.wait is not None
        block.wait()
        self.blocks.append(block)

    def fail(self, error: DisaggError) -> None:
        self.failures.append(error)

    def computed(self, wait: Callable[[], None] | None) -> None:
        self.finished = True


class Bench:
    """The only worker of a tiny model, its pages, and what it has sent and reported."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages = {name: torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM) for name in LAYERS}
        impl = SimpleNamespace(do_kv_cache_update=self._write)
        modules = {name: SimpleNamespace(impl=impl, kv_cache=pages) for name, pages in self.pages.items()}
        config = SimpleNamespace(
            model_config=SimpleNamespace(model=str(folder), max_model_len=64, dtype="torch.float32"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
            compilation_config=SimpleNamespace(static_forward_context=modules),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        group = SimpleNamespace(layer_names=LAYERS, kv_cache_spec=SimpleNamespace(block_size=SIZE))
        self.worker = WorkerSide(config, [group], rank=0)
        self.worker.register(self.pages)
        for pages in self.pages.values():
            pages.copy_(torch.randn(pages.shape))
        self.shipments: list[FakeShipment] = []
        self.reported: list[DisaggError] = []
        self.make: Callable[[KVOrder, Any], FakeShipment] = FakeShipment
        monkeypatch.setattr("disagg.engines.vllm.worker.Shipment", self._open)
        monkeypatch.setattr(
            "disagg.engines.vllm.worker.report_failure", lambda order, parts, error: self.reported.append(error)
        )

    def step(self, *pieces: PromptPiece) -> None:
        self.worker.begin(StepOrders(list(pieces)))
        for name in self.pages:
            self.worker.save(name)
        self.worker.end()

    def _open(self, order: KVOrder, header: Any, beats: Callable[[], int]) -> FakeShipment:
        self.shipments.append(self.make(order, header))
        return self.shipments[-1]

    @staticmethod
    def _write(module: Any, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        pages[slots // SIZE, :, slots % SIZE] = torch.cat([keys, values], -1)


@pytest.fixture
def bench(tiny: tiny_models.TinyModel, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tiny("llama"), monkeypatch)


def piece(id: str, rows: range, *, first: bool = False, last: bool = False) -> PromptPiece:
    share = KVProgress(rows.start, rows.stop, 1.0)
    return PromptPiece(id, rows, ([2, 5, 3],), last, share, Begun(ORDER, 10, "hash") if first else None)


def test_a_prompts_step_has_ended_when_the_next_one_begins_also_that_of_another(bench: Bench) -> None:
    bench.step(piece("a", range(6), first=True))
    bench.step(piece("b", range(6), first=True))
    assert [(len(one.steps), one.ended_steps) for one in bench.shipments] == [(1, 1), (1, 0)]


def test_each_step_sends_its_rows_of_every_layer_from_the_blocks_of_the_table(bench: Bench) -> None:
    bench.step(piece("a", range(6), first=True))
    bench.step(piece("a", range(6, 10), last=True))
    (shipment,) = bench.shipments
    places = [(block.layer, block.start, block.end) for block in shipment.blocks]
    assert places == [(n, 0, 6) for n in range(3)] + [(n, 6, 10) for n in range(3)]
    row_7_of_head_1 = bench.pages[LAYERS[2]][5, 1, 3, :DIM]
    sent = torch.frombuffer(shipment.blocks[-1].keys[1], dtype=torch.float32).view(4, DIM)
    assert torch.equal(sent[1], row_7_of_head_1)
    assert (shipment.finished, shipment.failures) == (True, [])


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_ranks_that_hold_other_rows_of_a_prompt_are_refused(name: str) -> None:
    parallel = SimpleNamespace(tensor_parallel_size=8, **{name: 2})
    with pytest.raises(ModelError, match=f"vLLM runs with {name} = 2, whose pages are not read"):
        WorkerSide(SimpleNamespace(parallel_config=parallel), [], rank=0)


def test_layers_that_read_the_kv_of_earlier_ones_are_refused(bench: Bench) -> None:
    del bench.worker._groups[list(bench.pages)[-1]]  # vLLM has no group for them
    with pytest.raises(ModelError, match=r"layers \[\d+\] read the KV of earlier ones"):
        bench.worker.register(bench.pages)


def test_every_layer_beats(bench: Bench) -> None:
    beats: list[None] = []
    bench.worker.on_layer = lambda: beats.append(None)
    bench.step()
    assert len(beats) == len(LAYERS)


def test_a_prompt_for_which_nothing_can_be_opened_is_reported_and_the_others_are_sent(bench: Bench) -> None:
    def out_of_descriptors(order: KVOrder, header: Any) -> FakeShipment:
        bench.make = FakeShipment
        raise OSError(24, "Too many open files")

    bench.make = out_of_descriptors
    bench.step(piece("a", range(10), first=True, last=True), piece("b", range(10), first=True, last=True))
    assert [type(error) for error in bench.reported] == [HandoffError]
    assert "Too many open files" in str(bench.reported[0])
    assert [shipment.finished for shipment in bench.shipments] == [True]


def test_a_prompt_whose_rows_cannot_be_staged_fails_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: Any, **options: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("disagg.engines.vllm.worker.RowEmitter", out_of_memory)
        bench.step(piece("a", range(10), first=True, last=True))
    bench.step(piece("b", range(10), first=True, last=True))
    first, second = bench.shipments
    assert ([type(error) for error in first.failures], first.finished) == ([HandoffError], False)
    assert (second.failures, second.finished) == ([], True)


def test_a_layer_that_cannot_be_read_fails_its_prompt_and_not_the_step(bench: Bench) -> None:
    def out_of_memory(pages: torch.Tensor, key_dim: int) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    bench.worker._forms[LAYERS[1]] = out_of_memory
    bench.step(piece("a", range(10), first=True, last=True))
    (shipment,) = bench.shipments
    assert [type(error) for error in shipment.failures] == [HandoffError]
    assert "CUDA out of memory" in str(shipment.failures[0])
