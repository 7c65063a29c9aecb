"""The tiny checkpoints are of use to other tests: hub form, varied text, the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny_models


@pytest.fixture(scope="module", params=tiny_models.ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(request.param, tmp_path_factory.mktemp(request.param))


def test_greedy_text_has_many_distinct_tokens_and_never_ends(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for length in (1, 100):
        ids = torch.randint(5, tiny_models.VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
        made = model.generate(ids, max_new_tokens=64, do_sample=False)[0, length:].tolist()
        assert len(made) == 64 and len(set(made)) > 20


def test_config_keeps_the_flat_keys_of_hub_checkpoints(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert "rope_theta" in config and "rope_parameters" not in config


def test_the_same_seed_gives_the_same_files_and_another_seed_other_weights(tmp_path: Path) -> None:
    folders = [tiny_models.make("llama", tmp_path / str(n), seed=n // 2) for n in range(3)]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1


def test_overrides_replace_keys_of_the_config(tmp_path: Path) -> None:
    path = tiny_models.make("gpt_oss", tmp_path, num_hidden_layers=2, layer_types=["full_attention"] * 2)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert len(model.model.layers) == 2
