"""Configurations that no table has, of types that are served: each is answered as by each framework alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.surveys.fuzz import changed_once, near, outcome
from tests.surveys.tables import known

pytestmark = pytest.mark.slow
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
# What is changed of a configuration; None: a key is removed.
CHANGED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "layers of one kind, of which mlx-lm looks for both": ("gpt_oss", {"layer_types": ["full_attention"] * 4}),
    "the same with windows, and a letter for each": ("exaone4", {"layer_types": ["sliding_attention"] * 4}),
    "a rope that mlx-lm computes for longer prompts only": ("gpt_oss", {"rope_scaling": DYNAMIC}),
    "a rope of a model that has none": ("gpt2", {"rope_scaling": YARN}),
    "a number of dense layers that transformers does not read": ("glm4_moe_lite", {"first_k_dense_replace": 2}),
    "kinds of layers that mlx-lm reads as numbers": ("mimo_v2_flash", {"layer_types": ["full_attention"] * 4}),
    "no width of heads, which mlx-lm wants": ("glm4_moe", {"head_dim": None}),
    "a number of heads that multi_query contradicts": ("gpt_bigcode", {"multi_query": False}),
    "a width of heads that transformers has under two names": ("bailing_hybrid", {"head_dim": None}),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_configuration_is_answered_as_by_each_framework_alone(what: str, tmp_path: Path) -> None:
    name, changes = CHANGED[what]
    entry = {key: value for key, value in {**known()[name], **changes}.items() if changes.get(key, key) is not None}
    assert outcome(entry, tmp_path / "model", (2, 97)) in ("exact", "patched")


def test_a_multimodal_mixture_whose_head_is_the_embeddings_is_served(tmp_path: Path) -> None:
    entry = known()["qwen3_vl_moe"]
    text = {**entry["text_config"], "tie_word_embeddings": True}
    tied = {**entry, "tie_word_embeddings": True, "text_config": text}
    assert outcome(tied, tmp_path / "model", (2, 97)) == "exact"


def test_one_changed_value_changes_both_frameworks_alike(tmp_path: Path) -> None:
    entry = dict(changed_once(known()["bailing_hybrid"]))["rms_norm_eps = 0.001"]
    assert entry["rms_norm_eps"] == 1e-3
    assert outcome(entry, tmp_path / "model", compared=near) == "patched"
