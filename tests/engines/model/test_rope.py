"""disagg/engines/model/rope.py against transformers' own formulas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from disagg.engines.model.rope import reference_rope
from disagg.errors import ModelError

BASE = {"rope_theta": 150000.0}
YARN = {**BASE, "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    **BASE,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    **BASE,
    "rope_type": "longrope",
    "original_max_position_embeddings": 131072,
    "short_factor": [1.0 + pair / 8 for pair in range(32)],
    "long_factor": [2.0 + pair for pair in range(32)],
}
CASES = {
    "dynamic": {**BASE, "rope_type": "dynamic", "factor": 6.0},
    "linear": {**BASE, "rope_type": "linear", "factor": 4.0},
    "linear, half of each head": {**BASE, "rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
    "llama3": LLAMA3,
    "llama3, partial": {**LLAMA3, "partial_rotary_factor": 0.25},
    "yarn": YARN,
    "yarn without truncation": {**YARN, "truncate": False},
    "yarn, partial": {**YARN, "partial_rotary_factor": 0.5, "truncate": False},
    "yarn with its own betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn with a given attention factor": {**YARN, "attention_factor": 1.5},
    "longrope within its short context": LONGROPE,
    "longrope with equal sets": {
        **LONGROPE,
        "long_factor": LONGROPE["short_factor"],
        "original_max_position_embeddings": 4096,
    },
    "yarn over a range that is empty": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
}


def config(parameters: dict[str, object]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=131072, rope_parameters=parameters
    )


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_scale_are_those_of_transformers(name: str) -> None:
    parameters = CASES[name]
    want, scale = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config(dict(parameters)), torch.device("cpu"))
    rope = reference_rope(parameters, 64, 131072)
    assert rope.inv_freq == pytest.approx(want.tolist(), rel=2e-6)
    assert rope.scale == pytest.approx(scale)


def test_default_frequencies_are_those_of_transformers() -> None:
    module = LlamaRotaryEmbedding(config({**BASE, "rope_type": "default"}))
    assert reference_rope(BASE, 64, 131072).inv_freq == pytest.approx(module.inv_freq.tolist(), rel=2e-6)


def test_truncation_changes_yarn_frequencies_much() -> None:
    truncated = reference_rope(YARN, 64, 131072).inv_freq
    exact = reference_rope({**YARN, "truncate": False}, 64, 131072).inv_freq
    assert max(abs(a - b) / b for a, b in zip(truncated, exact, strict=True)) > 0.4


def test_rope_that_depends_on_the_prompt_length_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="rotates tokens otherwise if its prompt has more than 2048"):
        reference_rope({**LONGROPE, "original_max_position_embeddings": 2048}, 64, 4096)


def test_a_dynamic_rope_with_alpha_is_that_of_hunyuan() -> None:
    parameters = {**BASE, "rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
    stated: Any = SimpleNamespace(head_dim=64, rope_parameters=parameters)
    want, _ = HunYuanDenseV1RotaryEmbedding.compute_ntk_alpha_rope_parameters(stated)
    assert reference_rope(parameters, 64, 131072).inv_freq == pytest.approx(want.tolist(), rel=2e-6)


def test_an_unknown_rope_type_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match="default, dynamic, linear, llama3, longrope, proportional, yarn"):
        reference_rope({**BASE, "rope_type": "spiral"}, 64, 4096)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ModelError, match="low_freq_factor"):
        reference_rope({**BASE, "rope_type": "llama3", "factor": 8.0}, 64, 4096)
