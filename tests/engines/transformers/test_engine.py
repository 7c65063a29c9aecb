"""disagg/engines/transformers/engine.py: chunked prefill emits exactly the KV that transformers' own cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from disagg.api.sampling import Sampling
from disagg.config import DType, EngineOptions
from disagg.engines.base import AnswerRequest, EmittingEngine, PrefillRun
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.errors import Cancelled, PeerLost, PreflightRefused
from disagg.kv.blocks import Block, KVBlock
from tests import tiny_models
from tests.engines.mlx.mlx_parts import References
from tests.tiny_models import TinyModel

W = tiny_models.WINDOW
CONTEXT = 2048
LENGTHS = [0, 1, W - 7, W, W + 37]


def engine_on(path: Any, dtype: DType = "float32", chunk_tokens: int = 48) -> TransformersPrefillEngine:
    options = EngineOptions(
        "transformers", dtype=dtype, device="cpu", chunk_tokens=chunk_tokens, threads=1, max_held_bytes=0
    )
    return TransformersPrefillEngine(path, CONTEXT, options)


@pytest.fixture(scope="module")
def gpt_oss(tiny: TinyModel) -> TransformersPrefillEngine:
    return engine_on(tiny("gpt_oss"))


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(5, tiny_models.VOCAB, (length,), generator=generator).tolist()
    return tokens


def collected(engine: EmittingEngine, blocks: list[KVBlock], total: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The emitted rows of every layer, [heads, rows, dim], in float32; asserts that they cover the layout's rows."""
    out = []
    for index, layer in enumerate(engine.info.layout.layers):
        mine = [block for block in blocks if block.layer == index]
        rows = [row for block in mine for row in range(block.start, block.end)]
        assert rows == list(layer.rows(total))
        out.append((joined(engine, [b.keys for b in mine]), joined(engine, [b.values for b in mine])))
    return out


def joined(engine: EmittingEngine, parts: list[Any]) -> torch.Tensor:
    layer = engine.info.layout.layers[0]
    dtype = getattr(torch, engine.info.layout.dtype)
    heads = [b"".join(bytes(part[head]) for part in parts) for head in range(layer.kv_heads)]
    tensors = [torch.frombuffer(bytearray(h), dtype=dtype).view(-1, layer.key_dim) if h else None for h in heads]
    return torch.stack([t if t is not None else torch.empty(0, layer.key_dim) for t in tensors]).float()


def one_shot(path: Any, tokens: list[int], dtype: DType = "float32") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of all rows of every layer, from one forward pass with transformers' own cache."""
    model = loaded(path, dtype)
    cache = DynamicCache()  # without a config it never drops rows
    assert cache.layer_class_to_replicate is DynamicLayer
    if tokens:
        with torch.inference_mode():
            model.base_model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return [(layer.keys[0].float(), layer.values[0].float()) for layer in cache.layers]


@lru_cache(maxsize=1)
def loaded(path: Any, dtype: DType) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_emitted_kv_is_that_of_one_forward_pass(tiny: TinyModel, architecture: str) -> None:
    path = tiny(architecture)
    engine = engine_on(path)
    for length in LENGTHS:
        tokens = prompt(length)
        want = one_shot(path, tokens)
        for chunk in (17, W, 4096):
            blocks: list[Any] = []
            timing = engine.prefill(tokens, blocks.append, chunk_tokens=chunk)
            assert timing.tokens == length and timing.compute_s >= 0
            for layer, got, full in zip(
                engine.info.layout.layers, collected(engine, blocks, length), want, strict=bool(tokens)
            ):
                kept = layer.rows(length)
                for mine, theirs in zip(got, full, strict=True):
                    torch.testing.assert_close(mine, theirs[:, kept.start : kept.stop], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_half_precision_rows_are_carried_bit_for_bit(tiny: TinyModel, architecture: str, dtype: DType) -> None:
    engine = engine_on(tiny(architecture), dtype)
    tokens = prompt(W + 37)
    blocks: list[Any] = []
    engine.prefill(tokens, blocks.append, chunk_tokens=4096)
    want = one_shot(tiny(architecture), tokens, dtype)
    for layer, got, full in zip(engine.info.layout.layers, collected(engine, blocks, len(tokens)), want, strict=True):
        assert all(torch.equal(g, f[:, layer.rows(len(tokens)).start :]) for g, f in zip(got, full, strict=True))


def test_emitted_bytes_are_what_the_layout_counts(gpt_oss: TransformersPrefillEngine) -> None:
    for length in LENGTHS:
        blocks: list[Any] = []
        gpt_oss.prefill(prompt(length), blocks.append, chunk_tokens=30)
        sent = sum(view.nbytes for block in blocks for view in (*block.keys, *block.values))
        assert sent == gpt_oss.info.layout.nbytes(length)


def test_a_layer_leaves_before_the_next_is_computed(gpt_oss: TransformersPrefillEngine) -> None:
    events: list[str] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, i=index: events.append(f"compute {i}"))
        for index, layer in enumerate(gpt_oss._model.model.layers)
    ]

    def emit(block: Block) -> None:
        assert isinstance(block, KVBlock)
        events.append(f"emit {block.layer}")

    gpt_oss.prefill(prompt(50), emit, chunk_tokens=25)
    for hook in hooks:
        hook.remove()
    one_chunk = [f"{what} {layer}" for layer in range(4) for what in ("compute", "emit")]
    assert events == one_chunk * 2


def test_the_engine_beats_with_each_layer_of_each_chunk_and_each_token(gpt_oss: TransformersPrefillEngine) -> None:
    beats: list[None] = []
    gpt_oss.on_beat = lambda: beats.append(None)
    try:
        gpt_oss.prefill(prompt(50), lambda block: None, chunk_tokens=25)
        assert len(beats) == 4 * 2
        for _ in gpt_oss.generate(prompt(26), Sampling(max_tokens=3)):
            pass
        assert len(beats) == 4 * 2 + 4 * (1 + 3)
    finally:
        del gpt_oss.on_beat


def test_several_prompts_are_computed_by_turns_as_if_each_were_alone(gpt_oss: TransformersPrefillEngine) -> None:
    prompts = [prompt(W + 90), prompt(40, seed=2), prompt(W + 37, seed=3)]
    alone: list[list[Any]] = [[], [], []]
    for tokens, blocks in zip(prompts, alone, strict=True):
        gpt_oss.prefill(tokens, blocks.append)
    by_turns: list[list[Any]] = [[], [], []]
    runs: list[PrefillRun] = [
        gpt_oss.start(tokens, blocks.append) for tokens, blocks in zip(prompts, by_turns, strict=True)
    ]
    answer: list[int] = []
    sampling = Sampling(max_tokens=6)
    runs.append(
        gpt_oss.start_answer(AnswerRequest(prompt(30, seed=4), sampling), lambda token: answer.append(token.id))
    )
    while not all(run.done for run in runs):
        for run in runs:
            if not run.done:
                run.step()
    assert answer == [token.id for token in gpt_oss.generate(prompt(30, seed=4), sampling)]
    for tokens, ours, theirs in zip(prompts, by_turns, alone, strict=True):
        for got, want in zip(*(collected(gpt_oss, blocks, len(tokens)) for blocks in (ours, theirs)), strict=True):
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_views_stay_unchanged_until_the_last_chunk(gpt_oss: TransformersPrefillEngine) -> None:
    seen: list[tuple[Block, list[bytes]]] = []

    def emit(block: Any) -> None:
        seen.append((block, [bytes(view) for view in (*block.keys, *block.values)]))

    gpt_oss.prefill(prompt(3 * W), emit, chunk_tokens=11)
    assert all([bytes(v) for v in (*b.keys, *b.values)] == copy for b, copy in seen if isinstance(b, KVBlock))


def test_full_layers_are_emitted_without_copying(gpt_oss: TransformersPrefillEngine) -> None:
    addresses = []

    def emit(block: Any) -> None:
        if block.layer == 1:
            addresses.append(torch.frombuffer(block.keys[0], dtype=torch.uint8).data_ptr())

    gpt_oss.prefill(prompt(40), emit, chunk_tokens=10)
    assert [b - a for a, b in pairwise(addresses)] == [10 * 32 * 4] * 3  # one buffer


def test_cancellation_is_seen_between_chunks(gpt_oss: TransformersPrefillEngine) -> None:
    blocks: list[Any] = []
    with pytest.raises(Cancelled, match="after 20 of 50 prompt tokens"):
        gpt_oss.prefill(prompt(50), blocks.append, chunk_tokens=10, cancelled=lambda: len(blocks) >= 4 * 2)
    assert max(block.end for block in blocks) == 20


def test_an_error_in_emit_ends_the_prefill_at_once(gpt_oss: TransformersPrefillEngine) -> None:
    calls: list[int] = []

    def emit(block: Any) -> None:
        calls.append(block.layer)
        raise PeerLost("the decode host closed the connection")

    with pytest.raises(PeerLost):
        gpt_oss.prefill(prompt(50), emit, chunk_tokens=10)
    assert calls == [0]
    assert gpt_oss.prefill(prompt(5), lambda block: None).tokens == 5


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss_yarn", "cohere2", "gemma3_text"])
@pytest.mark.parametrize("length", [1, W, W + 37])
def test_greedy_text_alone_is_that_of_transformers(
    tiny: TinyModel, reference: References, architecture: str, length: int
) -> None:
    tokens = prompt(length, seed=2)
    got = [t.id for t in engine_on(tiny(architecture), chunk_tokens=17).generate(tokens, Sampling(max_tokens=48))]
    assert got == reference(architecture).greedy(tokens, 48, draft=got)
    assert len(set(got)) > 20


def test_the_last_token_has_the_finish_reason(gpt_oss: TransformersPrefillEngine) -> None:
    tokens = list(gpt_oss.generate(prompt(20), Sampling(max_tokens=5)))
    assert [t.finish for t in tokens] == [None] * 4 + ["length"]
    eos = tokens[2].id
    assert eos not in {tokens[0].id, tokens[1].id}
    stopped = list(with_eos(gpt_oss, eos, Sampling(max_tokens=5)))
    assert [(t.id, t.finish) for t in stopped] == [*((t.id, None) for t in tokens[:2]), (eos, "stop")]
    assert len(list(with_eos(gpt_oss, eos, Sampling(max_tokens=5, ignore_eos=True)))) == 5


def with_eos(engine: TransformersPrefillEngine, eos: int, sampling: Sampling) -> Iterator[Any]:
    """Generate as if `eos` ended the answer: tiny models never choose their own end-of-sequence token."""
    original = engine.info
    engine.info = replace(original, eos_ids=frozenset({eos}))
    try:
        yield from engine.generate(prompt(20), sampling)
    finally:
        engine.info = original


def test_generation_is_cancelled_between_tokens(gpt_oss: TransformersPrefillEngine) -> None:
    made: list[int] = []
    with pytest.raises(Cancelled, match="while it was decoded"):
        made.extend(
            t.id
            for t in gpt_oss.generate(prompt(5), Sampling(max_tokens=50), cancelled=iter([False] * 4 + [True]).__next__)
        )


def test_logits_are_those_of_one_teacher_forced_pass(tiny: TinyModel) -> None:
    tokens = prompt(100)
    model = AutoModelForCausalLM.from_pretrained(tiny("cohere2"), dtype=torch.float32)
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0, -70:]
    engine = engine_on(tiny("cohere2"), chunk_tokens=32)
    torch.testing.assert_close(torch.tensor(engine.logits(tokens, 70)), want, rtol=1e-4, atol=1e-4)
    assert len(engine.logits(tokens, len(tokens))) == len(tokens)


def test_info_describes_the_loaded_model(gpt_oss: TransformersPrefillEngine) -> None:
    info = gpt_oss.info
    assert info.backend == "transformers/cpu"
    assert set(info.versions) == {"torch", "transformers"}
    assert info.profile.source == "transformers"
    assert info.memory_bytes > 100_000
    assert info.eos_ids == {tiny_models.EOS_ID, tiny_models.END_OF_TURN_ID}


def test_a_model_that_transformers_computes_otherwise_is_refused(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LlamaRotaryEmbedding.compute_default_rope_parameters

    def faster(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, float]:
        frequencies, scale = original(*args, **kwargs)
        return frequencies * 1.1, scale

    monkeypatch.setattr(LlamaRotaryEmbedding, "compute_default_rope_parameters", staticmethod(faster))
    with pytest.raises(PreflightRefused, match="rope"):
        engine_on(tiny("llama"))


def test_every_architecture_passes_the_preflight_here(tiny: TinyModel) -> None:
    for architecture in tiny_models.ARCHITECTURES:
        assert {finding.status for finding in engine_on(tiny(architecture)).info.preflight} == {"ok"}


def test_warm_up_leaves_nothing_behind(gpt_oss: TransformersPrefillEngine) -> None:
    before = [t.id for t in gpt_oss.generate(prompt(20), Sampling(max_tokens=5))]
    gpt_oss.warm_up()
    assert [t.id for t in gpt_oss.generate(prompt(20), Sampling(max_tokens=5))] == before
