"""Scores of a prompt: both frameworks give what transformers alone does, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from disagg.config import EngineOptions
from disagg.engines.base import ChunkScores
from disagg.engines.base.scores import SCORED_BYTES, scored_chunk
from disagg.engines.simulated.prefill import SimulatedPrefillEngine
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.errors import CapabilityMissing
from tests.engines.mlx.mlx_parts import Engines, References, prompt
from tests.tiny_models import VOCAB, WINDOW, TinyModel

TOP = 3
MODELS = ["llama", "gpt_oss", "gemma3_text", "cohere2"]


def engine_on(path: Any) -> TransformersPrefillEngine:
    options = EngineOptions("transformers", dtype="float32", device="cpu", chunk_tokens=48, max_held_bytes=1 << 20)
    return TransformersPrefillEngine(path, 2048, options)


def joined(chunks: Sequence[ChunkScores]) -> ChunkScores:
    return ChunkScores(*(np.concatenate(parts) for parts in zip(*chunks, strict=True)))


def expected(reference: Any, tokens: Sequence[int]) -> ChunkScores:
    rows = torch.from_numpy(reference.logits(tokens, len(tokens))[:-1]).log_softmax(-1)
    chosen = rows[range(len(rows)), list(tokens[1:])]
    best = rows.topk(TOP)
    return ChunkScores(
        chosen.numpy(),
        ((rows > chosen[:, None]).sum(-1) + 1).int().numpy(),
        best.indices.int().numpy(),
        best.values.numpy(),
    )


def assert_alike(scores: ChunkScores, other: ChunkScores) -> None:
    np.testing.assert_allclose(scores.logprobs, other.logprobs, atol=1e-4)
    np.testing.assert_allclose(scores.top_logprobs, other.top_logprobs, atol=1e-4)
    assert (scores.ranks != other.ranks).mean() < 0.02, "tokens as likely as each other may change places"
    assert (scores.top != other.top).mean() < 0.02
    assert np.ptp(scores.logprobs) > 1, "equal scores prove nothing"


@pytest.mark.parametrize("architecture", MODELS)
def test_both_frameworks_score_a_prompt_as_transformers_alone_does(
    architecture: str, tiny: TinyModel, mlx_engine: Engines, reference: References
) -> None:
    tokens = prompt(2 * WINDOW + 9)
    want = expected(reference(architecture), tokens)
    chunks: list[ChunkScores] = []
    engine = engine_on(tiny(architecture))
    run = engine.start_scores(tokens, TOP, chunks.append)
    while not run.done:
        run.step(40)
    run.close()
    assert_alike(joined(chunks), want)
    assert (len(chunks), run.held, engine.held_bytes) == (4, 0, 0)

    chunks.clear()
    mlx_engine(architecture).score(tokens, TOP, chunks.append, lambda: False)
    assert_alike(joined(chunks), want)


def test_a_prompt_of_one_token_has_no_scores(tiny: TinyModel, mlx_engine: Engines) -> None:
    chunks: list[ChunkScores] = []
    assert engine_on(tiny("llama")).start_scores([7], TOP, chunks.append).done
    mlx_engine("llama").score([7], TOP, chunks.append, lambda: False)
    assert not chunks


def test_without_alternatives_only_the_tokens_themselves_are_scored(tiny: TinyModel, mlx_engine: Engines) -> None:
    chunks: list[ChunkScores] = []
    run = engine_on(tiny("llama")).start_scores(prompt(9), 0, chunks.append)
    run.step()
    mlx_engine("llama").score(prompt(9), 0, chunks.append, lambda: False)
    assert [(one.logprobs.shape, one.top.shape, one.top_logprobs.shape) for one in chunks] == [
        ((8,), (8, 0), (8, 0))
    ] * 2
    np.testing.assert_allclose(chunks[0].logprobs, chunks[1].logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("chunk_tokens", "vocab_size", "scored"), [(2048, VOCAB, 2048), (2048, 151_936, 441), (2048, 1 << 40, 1)]
)
def test_the_logits_of_a_chunk_have_a_bound(chunk_tokens: int, vocab_size: int, scored: int) -> None:
    assert scored_chunk(chunk_tokens, vocab_size) == scored
    assert scored == 1 or scored * vocab_size * 4 <= SCORED_BYTES


def test_an_engine_without_logits_refuses(tiny: TinyModel) -> None:
    engine = SimulatedPrefillEngine(tiny("llama"), 2048, EngineOptions("simulated"), "dgx-spark")
    with pytest.raises(CapabilityMissing, match="scores no prompts"):
        engine.start_scores([1, 2], 0, lambda scores: None)
