"""Heads: the first layers of a model, computed chunk by chunk, emit the rows and the hidden states that the whole model
has there."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.api.sampling import Sampling
from disagg.config import DType, EngineOptions
from disagg.engines.base import ONE_TOKEN, AnswerRequest
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.errors import ModelError
from disagg.kv.blocks import ChunkEnd, HiddenBlock
from tests import tiny_models
from tests.engines.architectures.configs import config
from tests.engines.architectures.pairs import make
from tests.engines.transformers.heads import computed, hidden_states
from tests.tiny_models import TinyModel

W = tiny_models.WINDOW


def engine_on(
    path: Path,
    dtype: DType = "float32",
    *,
    chunk_tokens: int = 48,
    max_held_bytes: int = 1 << 30,
    layers: str | None = None,
) -> TransformersPrefillEngine:
    options = EngineOptions(
        "transformers",
        dtype,
        "cpu",
        chunk_tokens=chunk_tokens,
        threads=1,
        max_held_bytes=max_held_bytes,
        layers=layers,
    )
    return TransformersPrefillEngine(path, 2048, options)


@pytest.fixture(scope="module")
def gpt_oss(tiny: TinyModel) -> TransformersPrefillEngine:
    return engine_on(tiny("gpt_oss"), max_held_bytes=0)


def prompt(length: int, seed: int = 1) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(5, tiny_models.VOCAB) for _ in range(length)]


def test_only_the_layers_of_the_head_are_computed(gpt_oss: TransformersPrefillEngine) -> None:
    ran: list[int] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, i=index: ran.append(i))
        for index, layer in enumerate(gpt_oss._model.model.layers)
    ]
    emitted = computed(gpt_oss, prompt(96), 2)
    for hook in hooks:
        hook.remove()
    assert ran == [0, 1] * 2
    assert emitted.layers == {0, 1}


def test_a_chunk_has_its_layers_then_its_hidden_states_then_its_end(gpt_oss: TransformersPrefillEngine) -> None:
    blocks = computed(gpt_oss, prompt(100), 2).blocks
    shown = [
        f"{type(block).__name__} {block.start} {block.end}"
        if isinstance(block, HiddenBlock | ChunkEnd)
        else f"layer {block.layer}"
        for block in blocks
    ]
    assert shown == [
        line
        for start, end in ((0, 48), (48, 96), (96, 100))
        for line in ("layer 0", "layer 1", f"HiddenBlock {start} {end}", f"ChunkEnd {start} {end}")
    ]


@pytest.mark.parametrize("layers", [2, 4])
def test_a_sliding_layer_emits_of_each_chunk_what_it_keeps_at_its_end(
    gpt_oss: TransformersPrefillEngine, layers: int
) -> None:
    tokens, chunk = prompt(250), W + 20
    emitted = computed(gpt_oss, tokens, layers, chunk_tokens=chunk)
    ends = [min(end, 250) for end in range(chunk, 250 + chunk, chunk)]
    assert [end for _, end in emitted.chunks] == ends
    starts = {end: [start for start, _ in blocks] for end, blocks in emitted.rows(0).items()}
    assert starts == {end: [max(begin, end - W)] for (begin, end) in emitted.chunks}
    assert {end: [start for start, _ in blocks] for end, blocks in emitted.rows(1).items()} == {
        end: [begin] for (begin, end) in emitted.chunks
    }


def test_all_layers_in_chunks_are_the_rows_of_a_prompt_that_is_emitted_whole(
    gpt_oss: TransformersPrefillEngine,
) -> None:
    tokens = prompt(200)
    whole, chunks = computed(gpt_oss, tokens, None), computed(gpt_oss, tokens, 4)
    assert not any(isinstance(block, HiddenBlock) for block in (*whole.blocks, *chunks.blocks))
    assert whole.chunks == [] and chunks.chunks == [(0, 48), (48, 96), (96, 144), (144, 192), (192, 200)]
    for layer, layout in enumerate(gpt_oss.info.layout.layers):
        row_bytes = layout.row_bytes(4)
        kept = [len(rows) // row_bytes for blocks in whole.rows(layer).values() for _, rows in blocks]
        assert sum(kept) == len(layout.rows(200))
        if layout.kind == "full":
            assert whole.rows(layer) == chunks.rows(layer)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_hidden_states_in_half_precision_are_those_of_the_whole_model_bit_for_bit(
    tiny: TinyModel, dtype: DType
) -> None:
    engine = engine_on(tiny("qwen3"), dtype, chunk_tokens=4096)
    tokens = prompt(100)
    want = hidden_states(engine, tokens, 2)
    assert torch.equal(computed(engine, tokens, 2).hidden(want.dtype).view(want.shape), want)


@pytest.mark.parametrize(
    ("architecture", "start", "used"),
    [
        *(("llama", start, start) for start in (0, 20, 48, 130, 199)),
        *(("gpt_oss", start, used) for start, used in ((20, 0), (130, 0), (150, 150))),  # a window has spare rows
    ],
)
def test_a_head_begins_where_the_decode_host_has_no_kv_whatever_is_held(
    tiny: TinyModel, architecture: str, start: int, used: int
) -> None:
    engine, tokens = engine_on(tiny(architecture)), prompt(200)
    cold = computed(engine, tokens, 2, start=start)
    warm = computed(engine, tokens, 2, start=start)

    assert (cold.held, warm.held) == (0, used)
    want = hidden_states(engine, tokens, 2)[start:]
    for emitted in (cold, warm):
        assert emitted.chunks[0][0] == start and emitted.chunks[-1][1] == 200
        torch.testing.assert_close(emitted.hidden(torch.float32).view(want.shape), want, rtol=2e-4, atol=2e-4)
        assert min(first for blocks in emitted.rows(0).values() for first, _ in blocks) == start


def test_kv_of_one_number_of_layers_is_never_used_for_another(tiny: TinyModel) -> None:
    engine, tokens = engine_on(tiny("qwen3")), prompt(200)  # 3 layers
    computed(engine, tokens, 2)
    assert computed(engine, tokens, 1, start=150).held == 0
    assert computed(engine, tokens, 3).held == 0
    assert computed(engine, tokens, 2, start=150).held == 150
    assert computed(engine, tokens, None).held == 200, "all layers in chunks and all at once are the same KV"
    assert computed(engine, tokens, 2, start=150, salt="another").held == 0


def test_a_head_of_states_alone_goes_on_from_what_is_held(tmp_path: Path) -> None:
    make(config("qwen3_next"), tmp_path)  # its first layer of attention is the fourth
    engine, tokens = engine_on(tmp_path), prompt(200)
    computed(engine, tokens[:100], 2)
    warm, want = computed(engine, tokens, 2, start=120), hidden_states(engine, tokens, 2)[120:]
    assert warm.held == 100
    torch.testing.assert_close(warm.hidden(torch.float32).view(want.shape), want, rtol=2e-4, atol=2e-4)


def test_held_rows_of_all_layers_are_the_first_chunk(tiny: TinyModel) -> None:
    engine, tokens = engine_on(tiny("qwen3")), prompt(200)
    computed(engine, tokens[:100], 3)
    assert computed(engine, tokens, 3).chunks == [(0, 100), (100, 148), (148, 196), (196, 200)]
    assert computed(engine, tokens, 3, start=180).chunks == [(180, 200)], "all of it is held now"


@pytest.mark.parametrize(
    ("architecture", "layers", "reason"),
    [
        ("qwen3", 0, "the model has 3 layers: its first 0 cannot be computed"),
        ("qwen3", 4, "the model has 3 layers: its first 4 cannot be computed"),
    ],
)
def test_layers_outside_the_model_are_refused(tiny: TinyModel, architecture: str, layers: int, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        engine_on(tiny(architecture)).start([1, 2, 3], lambda block: None, layers=layers)


def test_a_layer_that_passes_on_something_else_than_hidden_states_is_refused_with_its_shape(tmp_path: Path) -> None:
    make(config("gemma3n"), tmp_path)
    engine = engine_on(tmp_path)
    engine.info = replace(engine.info, split=replace(engine.info.split, refusal=""))
    with pytest.raises(ModelError, match=r"a layer passes on \(4, 1, 40, 64\) torch.float32, not \(1, 40, 64\)"):
        computed(engine, prompt(40), 2)


def test_a_head_that_fails_leaves_the_next_prompt_alone(gpt_oss: TransformersPrefillEngine) -> None:
    def fail(block: Any) -> None:
        raise ModelError("the transfer failed")

    run = gpt_oss.start(prompt(60), fail, layers=2)
    with pytest.raises(ModelError, match="the transfer failed"):
        run.step()
    run.close()
    tokens = prompt(60, seed=2)
    want = hidden_states(gpt_oss, tokens, 3)
    got = computed(gpt_oss, tokens, 3).hidden(torch.float32)
    torch.testing.assert_close(got.view(want.shape), want, rtol=2e-4, atol=2e-4)
    assert len(list(gpt_oss.generate(tokens, Sampling(max_tokens=4, ignore_eos=True)))) == 4


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe", "gemma3_text"])  # sliding, experts, tied tables
def test_the_first_layers_loaded_alone_are_the_head_of_the_whole_model(tiny: TinyModel, architecture: str) -> None:
    whole, part = engine_on(tiny(architecture)), engine_on(tiny(architecture), layers="0:2")
    part.warm_up()
    tokens = prompt(200)
    for layers in (1, 2):
        want, got = computed(whole, tokens, layers), computed(part, tokens, layers)
        assert (got.chunks, got.layers) == (want.chunks, want.layers)
        assert all(got.rows(layer) == want.rows(layer) for layer in got.layers)
        assert torch.equal(got.hidden(torch.float32), want.hidden(torch.float32))
    assert (part.info.layout, part.info.fingerprint) == (whole.info.layout, whole.info.fingerprint)
    assert part.info.loaded == 2
    tied, names = part._model.config.tie_word_embeddings, dict(part._model.named_parameters())
    assert not any(".layers.2." in name for name in names) and ("lm_head.weight" in names) <= tied
    assert part.info.memory_bytes < whole.info.memory_bytes
    of_part, of_whole = ({one.component: one.status for one in engine.info.preflight} for engine in (part, whole))
    assert of_part.items() <= of_whole.items() and of_whole.keys() - of_part <= {"output head"}  # which is not loaded


def test_of_first_layers_neither_answers_nor_whole_prompts_are_computed(tiny: TinyModel) -> None:
    part = engine_on(tiny("qwen3"), layers="0:2")
    reason = "only the first 2 of the model's 3 layers are loaded here"
    for ask in (
        lambda: part.start([1, 2], lambda block: None),
        lambda: part.start([1, 2], lambda block: None, layers=3),
        lambda: part.start_answer(AnswerRequest([1, 2], ONE_TOKEN), lambda token: None),
        lambda: part.start_scores([1, 2], 0, lambda scores: None),
        lambda: part.logits([1, 2], 1),
    ):
        with pytest.raises(ModelError, match=reason):
            ask()
    run = part.probe()
    while not run.done:
        run.step()


def test_as_many_first_layers_as_there_are_is_the_whole_model(tiny: TinyModel) -> None:
    engine = engine_on(tiny("qwen3"), layers="0:3")
    assert engine.info.loaded is None
    engine.warm_up()
    assert engine.info.evidence is not None


def test_more_first_layers_than_there_are_are_refused(tiny: TinyModel) -> None:
    with pytest.raises(ModelError, match='the model has 3 layers, not the 4 of layers = "0:4"'):
        engine_on(tiny("qwen3"), layers="0:4")


def test_the_first_layers_of_a_model_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    make(config("gemma3n"), tmp_path)
    with pytest.raises(ModelError, match="cannot be divided between hosts: its layers pass on 4 hidden states"):
        engine_on(tmp_path, layers="0:2")
