"""disagg/engines/vllm/worker.py: rows and states out of pages into shipments; what fails ends one prompt, unraised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg.api.delivery import KVOrder, KVProgress
from disagg.engines.vllm.scheduler import Begun, PromptPiece, StepOrders
from disagg.engines.vllm.sharding import Sharding
from disagg.engines.vllm.worker import WorkerSide, _require_read
from disagg.errors import DisaggError, HandoffError, ModelError
from disagg.kv.blocks import KVBlock
from tests import tiny_models
from tests.engines.architectures.configs import config
from tests.engines.vllm.test_scheduler import ORDER
from tests.engines.vllm.test_states import BLOCK, Module

BLOCKS, SIZE, HEADS, DIM = 8, 4, 2, 16
LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(3)]


class FakeShipment:
    """Keeps what it is given."""

    def __init__(self, order: KVOrder, header: Any) -> None:
        self.sent: list[Any] = []
        self.failures: list[DisaggError] = []
        self.steps: list[KVProgress] = []
        self.ended_steps = 0
        self.finished = False

    def step(self, progress: KVProgress) -> None:
        self.steps.append(progress)

    def end_step(self) -> None:
        self.ended_steps += 1

    @property
    def blocks(self) -> list[KVBlock]:
        return [block for block in self.sent if isinstance(block, KVBlock)]

    def send(self, block: Any) -> None:
        if block.wait is not None:
            block.wait()
        self.sent.append(block)

    def fail(self, error: DisaggError) -> None:
        self.failures.append(error)

    def computed(self, wait: Callable[[], None] | None) -> None:
        self.finished = True


class Bench:
    """The only worker of a tiny model, its pages, and what it has sent and reported."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        modules = self._modules(SimpleNamespace(do_kv_cache_update=self._write))
        config = SimpleNamespace(
            model_config=SimpleNamespace(model=str(folder), max_model_len=64, dtype="torch.float32"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
            compilation_config=SimpleNamespace(static_forward_context=modules),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        group = SimpleNamespace(layer_names=list(self.pages), kv_cache_spec=SimpleNamespace(block_size=SIZE))
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

    def _modules(self, impl: Any) -> dict[str, Any]:
        self.pages = {name: torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM) for name in LAYERS}
        return {name: SimpleNamespace(impl=impl, kv_cache=pages) for name, pages in self.pages.items()}

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


def test_layers_that_read_the_kv_of_earlier_ones_send_nothing(bench: Bench) -> None:
    shared = "model.layers.3.self_attn.attn"
    bench.pages[shared] = bench.pages[LAYERS[2]]  # vLLM has no group for them
    modules = bench.worker._config.compilation_config.static_forward_context
    modules[shared] = modules[LAYERS[2]]
    bench.worker.register(bench.pages)
    bench.step(piece("a", range(10), first=True, last=True))
    (shipment,) = bench.shipments
    assert [block.layer for block in shipment.blocks] == [0, 1, 2]


def test_layers_that_the_checkpoint_does_not_have_are_refused(bench: Bench) -> None:
    bench.worker._groups["model.layers.9.self_attn.attn"] = bench.worker._groups[LAYERS[2]]
    modules = bench.worker._config.compilation_config.static_forward_context
    modules["model.layers.9.self_attn.attn"] = modules[LAYERS[2]]
    with pytest.raises(
        ModelError, match=r"has a KV cache for model\.layers\.9\.self_attn\.attn, and the checkpoint none"
    ):
        bench.worker.register({**bench.pages, "model.layers.9.self_attn.attn": bench.pages[LAYERS[2]]})
    del bench.pages[LAYERS[1]]
    with pytest.raises(ModelError, match=r"has KV caches for layers \[0, 2\] of a model with \[0, 1, 2\]"):
        bench.worker.register(bench.pages)


class HybridBench(Bench):
    """The same of a model whose first two layers that keep something have states, and the third one rows."""

    NAMES = ("backbone.layers.0.mixer", "backbone.layers.2.mixer", "backbone.layers.3.mixer.attn")

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mixers = [Module("nemotron_h") for _ in range(2)]
        super().__init__(folder, monkeypatch)

    def _modules(self, impl: Any) -> dict[str, Any]:
        first, second, rows = self.NAMES
        self.pages = {first: torch.zeros(0), second: torch.zeros(0), rows: torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM)}
        return {
            first: self.mixers[0],
            second: self.mixers[1],
            rows: SimpleNamespace(impl=impl, kv_cache=self.pages[rows]),
        }

    def step(self, *pieces: PromptPiece, shown: bool = False) -> None:
        self.worker.begin(StepOrders(list(pieces), shown=([BLOCK],) if shown else None))
        self.worker.save(self.NAMES[2])  # vLLM calls it for layers with rows only
        self.worker.end()


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HybridBench:
    model = tiny_models.make_from(config("nemotron_h"), tmp_path / "model")
    return HybridBench(model, monkeypatch)


def test_states_are_sent_with_a_prompts_last_rows_once_a_prompt_has_shown_how_they_lie(hybrid: HybridBench) -> None:
    hybrid.step(piece("early", range(4), first=True, last=True))
    assert ["no prompt has shown" in str(error) for error in hybrid.reported] == [True] and hybrid.shipments == []
    for mixer in hybrid.mixers:
        mixer.compute_one_token()
    hybrid.step(shown=True)
    hybrid.step(piece("a", range(3), first=True))
    hybrid.step(piece("a", range(3, 5), last=True))
    (shipment,) = hybrid.shipments
    assert [type(block).__name__ for block in shipment.sent] == ["KVBlock", *["StateBlock"] * 2, "KVBlock"]
    assert [block.layer for block in shipment.sent] == [2, 0, 1, 2]
    matrices = bytes(shipment.sent[1].tensors[-1])
    assert shipment.failures == [] and shipment.finished
    table = piece("a", range(1)).tables[0]
    assert matrices.endswith(hybrid.mixers[0].kv_cache[1][table[1]][-1].numpy().tobytes())


def test_a_rank_that_can_read_its_states_sends_nothing_if_another_one_cannot(
    hybrid: HybridBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid.worker._sharding = Sharding(2, 2)

    def gathered(read: torch.Tensor) -> torch.Tensor:
        assert read.is_floating_point(), "vLLM's CPU build gathers no integers"
        return torch.stack([read, 0 * read])

    monkeypatch.setattr("disagg.engines.vllm.worker._gathered", gathered)
    for mixer in hybrid.mixers:
        mixer.compute_one_token()
    hybrid.step(shown=True)
    assert hybrid.worker.seen == "another rank cannot read its states"
    hybrid.step(piece("a", range(4), first=True, last=True))
    assert ["another rank cannot read" in str(error) for error in hybrid.reported] == [True]


def test_a_model_whose_states_lie_in_an_unknown_order_sends_nothing(hybrid: HybridBench) -> None:
    hybrid.step(shown=True)  # random pages
    hybrid.step(piece("a", range(4), first=True, last=True))
    assert ["hold inputs in an unknown order" in str(error) for error in hybrid.reported] == [True]


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


@pytest.mark.parametrize(
    ("whole", "given"), [(False, '{"sliding_window": 63}'), (True, '{"text_config": {"sliding_window": 63}}')]
)
def test_a_vllm_serve_that_has_read_another_window_is_refused_with_the_option_that_sets_it_right(
    whole: bool, given: str
) -> None:
    text = SimpleNamespace(sliding_window=64)
    model = SimpleNamespace(hf_text_config=text, hf_config=SimpleNamespace(text_config=text) if whole else text)
    with pytest.raises(ModelError, match="without another sliding_window") as refused:
        _require_read(model, {"sliding_window": 63})
    assert refused.value.hint == f"start it with --hf-overrides '{given}'"
    text.sliding_window = 63
    _require_read(model, {"sliding_window": 63})
