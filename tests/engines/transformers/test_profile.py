"""disagg/engines/transformers/profile.py: the measured profile is that of the loaded model, not of its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from disagg.engines.model.profile import ModelProfile, compare
from disagg.engines.model.reference import Reference
from disagg.engines.transformers.profile import measure
from tests import tiny_models
from tests.tiny_models import TinyModel


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, ModelProfile]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype), Reference.open(path, 1024).profile


def refused(reference: ModelProfile, actual: ModelProfile) -> list[str]:
    return [finding.component for finding in compare(reference, actual) if finding.status == "refused"]


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_transformers_computes_what_the_checkpoint_describes(tiny: TinyModel, architecture: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model, reference = loaded(tiny(architecture), dtype)
        actual = measure(model, reference)
        assert [layer.layout for layer in actual.layers] == [layer.layout for layer in reference.layers]
        assert [layer.rope is None for layer in actual.layers] == [layer.rope is None for layer in reference.layers]
        assert refused(reference, actual) == []


def test_other_frequencies_in_the_loaded_module_are_found(tiny: TinyModel) -> None:
    model, reference = loaded(tiny("llama"))
    model.model.rotary_emb.inv_freq[2] *= 1.2
    assert refused(reference, measure(model, reference)) == ["rope"]


def test_a_layer_that_does_not_rotate_its_keys_is_found(tiny: TinyModel) -> None:
    model, reference = loaded(tiny("smollm3"))
    model.model.layers[1].self_attn.use_rope = 0
    actual = measure(model, reference)
    assert [layer.rope is not None for layer in actual.layers] == [True, False, True, False]
    assert refused(reference, actual) == ["rope"]


def test_other_heads_than_in_the_config_are_found(tiny: TinyModel) -> None:
    model, reference = loaded(tiny("llama"))
    attention = model.model.layers[1].self_attn
    attention.k_proj.weight.data = attention.k_proj.weight.data.repeat(2, 1)
    attention.v_proj.weight.data = attention.v_proj.weight.data.repeat(2, 1)
    attention.num_key_value_groups = 1
    assert measure(model, reference).layers[1].layout.kv_heads == 4
