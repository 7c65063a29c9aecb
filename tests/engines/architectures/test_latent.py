"""Latent attention that mlx-lm expands: kept as latent vectors, whatever form its weights have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy
import pytest
from mlx_lm.utils import load_model, quantize_model, save_model
from transformers import CONFIG_MAPPING

from disagg.config import EngineOptions
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.model.architectures import architecture_of, layers_of
from disagg.errors import ModelError
from tests.engines.architectures.configs import config
from tests.engines.architectures.pairs import CONTEXT, make
from tests.engines.mlx.mlx_parts import prompt

LONGROPE = {"type": "longrope", "original_max_position_embeddings": 8192}
OPTIONS = EngineOptions("mlx", dtype="float32", device="cpu", chunk_tokens=48)


def logits(folder: Path, tokens: list[int]) -> Any:
    engine = MLXDecodeEngine(folder, CONTEXT, OPTIONS)
    try:
        return engine.logits(tokens, 40)
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["deepseek_v2", "minicpm3"])
def test_logits_over_latent_vectors_are_those_of_mlx_lm_over_heads(name: str, tmp_path: Path) -> None:
    factors = [1.0 + pair / 8 for pair in range(8)]
    scaling = {"rope_scaling": LONGROPE | {"short_factor": factors, "long_factor": factors}}
    make({**config(name), **(scaling if name == "minicpm3" else {})}, tmp_path)
    alone, raw = load_model(tmp_path)
    tokens = prompt(120, seed=2)
    theirs = numpy.array(alone(mx.array([tokens]))[0, -40:])
    if name == "minicpm3":  # which does not scale logits if the output head is the embeddings
        theirs = theirs / (raw["hidden_size"] / raw["dim_model_base"])
    assert numpy.abs(logits(tmp_path, tokens) - theirs).max() < 2e-4 * numpy.abs(theirs).max()


def test_packed_weights_are_unpacked_as_they_are(tmp_path: Path) -> None:
    original, packed = tmp_path / "original", tmp_path / "packed"
    make({**config("deepseek_v2"), "kv_lora_rank": 64, "moe_intermediate_size": 64, "q_lora_rank": 64}, original)
    model, raw = load_model(original)
    model, written = quantize_model(model, raw, group_size=32, bits=8)
    for file in original.iterdir():
        if file.suffix != ".safetensors":
            packed.mkdir(exist_ok=True)
            (packed / file.name).write_bytes(file.read_bytes())
    save_model(packed, model)
    (packed / "config.json").write_text(json.dumps(written), encoding="utf-8")
    tokens = prompt(120, seed=3)
    theirs = numpy.array(model(mx.array([tokens]))[0, -40:])
    assert numpy.abs(logits(packed, tokens) - theirs).max() < 2e-4 * numpy.abs(theirs).max()


def test_a_single_expert_of_kimi_linear_whose_weight_is_normalised_is_refused(tmp_path: Path) -> None:
    given = {**config("kimi_linear"), "num_experts_per_tok": 1, "num_experts_per_token": 1, "norm_topk_prob": True}
    text = CONFIG_MAPPING[given.pop("model_type")](**given)
    with pytest.raises(ModelError, match="mlx-lm ignores norm_topk_prob if each token has one expert"):
        layers_of(text, tmp_path)


@pytest.mark.parametrize("name", ["deepseek_v2", "minicpm3", "deepseek_v3"])
def test_a_host_with_vllm_is_told_the_epsilon_of_latent_vectors(name: str) -> None:
    given = {**config(name), "rms_norm_eps": 1e-5}
    text = CONFIG_MAPPING[given.pop("model_type")](**given)
    assert architecture_of(text).latent_epsilon(text) == 1e-6
