"""The simulated prefill engine as the head of a split: the first layers of a prompt, in chunks that can be used one by
one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.simulated.prefill import SimulatedPrefillEngine
from disagg.errors import ModelError
from disagg.kv.blocks import Block, ChunkEnd, HiddenBlock, KVBlock, StateBlock
from tests.simulated import write_config

OPTIONS = EngineOptions("simulated", chunk_tokens=64)


def engine(tmp_path: Path, hardware: str = "h200-sxm", **changes: object) -> SimulatedPrefillEngine:
    return SimulatedPrefillEngine(write_config(tmp_path, **changes), 4096, OPTIONS, hardware)


def emitted(prefill: SimulatedPrefillEngine, tokens: int, layers: int, start: int = 0, salt: str = "") -> list[Block]:
    blocks: list[Block] = []
    run = prefill.start(range(tokens), blocks.append, start=start, layers=layers, salt=salt)
    while not run.done:
        run.step()
    run.close()
    return blocks


def chunks(blocks: list[Block]) -> list[tuple[ChunkEnd, list[Block]]]:
    """Each ChunkEnd with the blocks since the one before."""
    found: list[tuple[ChunkEnd, list[Block]]] = []
    since: list[Block] = []
    for block in blocks:
        if isinstance(block, ChunkEnd):
            found.append((block, since))
            since = []
        else:
            since.append(block)
    assert not since, "something follows the last chunk"
    return found


@pytest.mark.parametrize("layers", [1, 3, 8])
def test_each_chunk_has_the_rows_that_its_layers_keep_after_it(tmp_path: Path, layers: int) -> None:
    prefill = engine(tmp_path, layer_types=["sliding_attention", "full_attention"] * 4, sliding_window=32)
    found = chunks(emitted(prefill, 200, layers))
    assert [(end.start, end.end) for end, _ in found] == [(0, 64), (64, 128), (128, 192), (192, 200)]
    for end, blocks in found:
        kept = [layer.rows(end.end, end.start) for layer in prefill.info.layout.layers[:layers]]
        rows = [block for block in blocks if isinstance(block, KVBlock)]
        assert [range(block.start, block.end) for block in rows] == kept
        assert [block.layer for block in rows] == list(range(layers))


def test_each_chunk_ends_with_its_hidden_states_unless_all_layers_are_computed(tmp_path: Path) -> None:
    prefill = engine(tmp_path)
    for end, blocks in chunks(emitted(prefill, 200, 5)):
        hidden = blocks[-1]
        assert isinstance(hidden, HiddenBlock)
        assert (hidden.start, hidden.end) == (end.start, end.end)
        assert len(hidden.rows) == (end.end - end.start) * 2048 * 2
    assert not [block for block in emitted(prefill, 200, 8) if isinstance(block, HiddenBlock)]


def test_chunks_begin_at_the_token_that_is_asked_for(tmp_path: Path) -> None:
    found = chunks(emitted(engine(tmp_path), 200, 4, start=100))
    assert [(end.start, end.end) for end, _ in found] == [(100, 128), (128, 192), (192, 200)]
    assert all(block.start >= 100 for _, blocks in found for block in blocks if not isinstance(block, StateBlock))


def test_a_head_computes_all_tokens_whose_hidden_states_are_wanted(tmp_path: Path) -> None:
    prefill = engine(tmp_path)
    emitted(prefill, 200, 4)
    assert prefill.start(range(200), lambda block: None, layers=4).held == 0
    assert prefill.start(range(200), lambda block: None, layers=4, start=150).held == 150
    assert prefill.start(range(200), lambda block: None, layers=5, start=150).held == 0, "of other layers"
    assert prefill.start(range(200), lambda block: None).held == 0, "of other layers"
    assert prefill.held_bytes == prefill.info.layout.nbytes(200) // 2


def test_what_is_held_of_a_whole_prompt_is_a_chunk(tmp_path: Path) -> None:
    prefill = engine(tmp_path)
    emitted(prefill, 100, 8)
    found = chunks(emitted(prefill, 200, 8, start=30))
    assert [(end.start, end.end) for end, _ in found] == [(30, 100), (100, 164), (164, 200)]
    assert [(end.start, end.end) for end, _ in chunks(emitted(prefill, 200, 8))] == [(0, 200)]


def test_what_is_held_of_a_whole_prompt_comes_in_one_chunk(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    prefill = engine(tmp_path, layer_types=kinds, sliding_window=32)
    emitted(prefill, 200, 8)
    ((end, blocks),) = chunks(emitted(prefill, 200, 8))
    assert (end.start, end.end) == (0, 200)
    assert [(block.start, block.end) for block in blocks if isinstance(block, KVBlock)][:2] == [(168, 200), (0, 200)]


def test_states_come_with_the_last_chunk_and_of_the_heads_layers_only() -> None:
    prefill = SimulatedPrefillEngine("shape:qwen3-next-80b", 4096, OPTIONS, "m3-ultra")
    (_, first), (_, last) = chunks(emitted(prefill, 70, 6))
    assert not [block for block in first if isinstance(block, StateBlock)]
    kinds = [layer.kind for layer in prefill.info.layout.layers[:6]]
    assert [block.layer for block in last if isinstance(block, StateBlock)] == [
        index for index, kind in enumerate(kinds) if kind == "state"
    ]


def test_a_head_takes_the_time_of_its_layers(tmp_path: Path) -> None:
    prefill = engine(tmp_path, "m3-ultra")
    run = prefill.start(range(256), lambda block: None, layers=2, chunk_tokens=256)
    while not run.done:
        run.step()
    model = prefill._model
    head, whole = model.piece(256, range(256), range(2)).seconds, model.piece(256, range(256)).seconds
    assert head == pytest.approx(whole / 4)
    assert run.timing.compute_s >= head


@pytest.mark.parametrize("layers", [0, 9])
def test_layers_that_the_model_does_not_have_are_refused(tmp_path: Path, layers: int) -> None:
    with pytest.raises(ModelError, match=f"the model has 8 layers: its first {layers} cannot be computed"):
        engine(tmp_path).start([1, 2], lambda block: None, layers=layers)


def test_an_empty_rest_has_no_chunk(tmp_path: Path) -> None:
    assert emitted(engine(tmp_path), 0, 4) == []
    assert chunks(emitted(engine(tmp_path), 100, 4, start=100)) == []


def test_it_still_answers_alone(tmp_path: Path) -> None:
    prefill = engine(tmp_path)
    emitted(prefill, 100, 4)
    assert len(list(prefill.generate(range(100), Sampling(max_tokens=3)))) == 3


def test_hidden_states_are_numbers(tmp_path: Path) -> None:
    (_, blocks), *_ = chunks(emitted(engine(tmp_path), 64, 4))
    hidden = blocks[-1]
    assert isinstance(hidden, HiddenBlock)
    bits = numpy.frombuffer(hidden.rows, numpy.uint16)  # bfloat16: sign, 8 bits of exponent, 7 of fraction
    assert not ((bits >> 7) & 0xFF == 0xFF).any()


def test_a_part_of_a_model_fits_a_machine_that_the_model_does_not_fit() -> None:
    part = replace(OPTIONS, layers="0:8")
    prefill = SimulatedPrefillEngine("shape:gpt-oss-120b", 4096, part, "rtx-4090")
    assert (prefill.info.loaded, prefill.info.split.layers) == (8, 36)
    assert prefill.info.memory_bytes < 24e9
    assert len(chunks(emitted(prefill, 10, 8))) == 1
    with pytest.raises(ModelError, match="only the first 8 of the model's 36 layers are loaded here"):
        prefill.start([1, 2], lambda block: None, layers=9)
    with pytest.raises(ModelError, match="only the first 8 of the model's 36 layers are loaded here"):
        list(prefill.generate([1, 2], Sampling(max_tokens=1)))
    with pytest.raises(ModelError, match="gpt-oss-120b has 36 layers, not 37"):
        SimulatedPrefillEngine("shape:gpt-oss-120b", 4096, replace(OPTIONS, layers="0:37"), "h200-sxm")
    whole = SimulatedPrefillEngine("shape:gpt-oss-120b", 4096, replace(OPTIONS, layers="0:36"), "h200-sxm")
    assert whole.info.loaded is None
