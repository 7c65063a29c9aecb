"""disagg/engines/model/architectures/weights.py: output heads and biases that config.json and the checkpoint have are
those that both frameworks compute with, or the model is refused in one sentence. And ropes that mlx-lm rejects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from disagg.config import EngineOptions
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.transformers.engine import TransformersPrefillEngine
from disagg.errors import ModelError
from tests.engines.architectures.pairs import CONTEXT, Pair, loaded, make, running
from tests.engines.mlx.mlx_parts import prompt, start
from tests.surveys.tables import known

OPTIONS = EngineOptions("transformers", dtype="float32", device="cpu")
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
# What is changed in a configuration, and which component of which framework is then set right.
SET_RIGHT: Mapping[str, tuple[str, dict[str, Any], set[str]]] = {
    "a head that mlx-lm has always": ("qwen2_moe", TIED, {"mlx-lm output head"}),
    "a head that mlx-lm has always, beside biases": ("stablelm", TIED, {"mlx-lm output head"}),
    "a head that both have always": ("nemotron_h", TIED, {"mlx-lm output head", "transformers output head"}),
    "a head that transformers has always": ("kimi_linear", TIED, {"transformers output head"}),
    "embeddings that mlx-lm ties always": ("cohere", UNTIED, {"mlx-lm output head"}),
    "embeddings of another name": ("gpt2", UNTIED, {"mlx-lm output head"}),
    "a head that both take": ("qwen3", UNTIED, set()),
    "embeddings that mlx-lm multiplies with itself": ("seed_oss", TIED, set()),
    "a head that mlx-lm takes if it is there": ("gemma3_text", UNTIED, set()),
    "biases that mlx-lm leaves out": ("qwen3", {"attention_bias": True}, {"mlx-lm biases"}),
    "biases that mlx-lm has always": ("qwen2_moe", {"qkv_bias": False}, {"mlx-lm biases"}),
    "a rope that mlx-lm rejects": ("qwen2_moe", {"rope_scaling": YARN}, {"mlx-lm rope"}),
    "a rope_scaling that is none": ("nemotron", {"rope_scaling": {"rope_type": "default"}}, set()),
}


@pytest.mark.parametrize("what", SET_RIGHT)
def test_both_frameworks_compute_with_the_weights_that_the_checkpoint_has(what: str, tmp_path: Path) -> None:
    name, changes, expected = SET_RIGHT[what]
    config = {**known()[name], **changes}
    with running(config, tmp_path / "model") as pair:
        infos = {"transformers": pair.prefill.info, "mlx-lm": pair.decode.info}
        found = {
            f"{framework} {finding.component}"
            for framework, info in infos.items()
            for finding in info.preflight
            if finding.status == "patched"
        }
        assert {one for one in found if one.endswith(("head", "biases", "rope"))} == expected
        assert {info.profile.tied for info in infos.values()} == {config["tie_word_embeddings"]}
        require_same_answers(pair)


def require_same_answers(pair: Pair) -> None:
    prompts = [prompt(length, seed=length) for length in (2, 90)]
    answers = [start(pair.decode, tokens, pair.kv(tokens), max_tokens=12).result() for tokens in prompts]
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer == pair.greedy(tokens, answer)
        assert answer == start(pair.decode, tokens, max_tokens=12).result()


@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "nemotron_h", "gemma2"])
def test_a_stored_head_that_is_the_embeddings_changes_nothing(name: str, tmp_path: Path) -> None:
    make({**known()[name], **TIED}, tmp_path / "model")
    store_head(tmp_path / "model", lambda embeddings: embeddings.clone())
    with loaded(tmp_path / "model") as pair:
        assert pair.prefill.info.profile.tied is pair.decode.info.profile.tied is True
        require_same_answers(pair)


@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "nemotron_h", "gemma2"])
@pytest.mark.parametrize("engine", [TransformersPrefillEngine, MLXDecodeEngine])
def test_a_stored_head_that_contradicts_config_json_is_refused_with_both_ways_out(
    engine: Any, name: str, tmp_path: Path
) -> None:
    make({**known()[name], **TIED}, tmp_path / "model")
    store_head(tmp_path / "model", lambda embeddings: embeddings + 1.0)
    with pytest.raises(ModelError) as error:
        engine(tmp_path / "model", CONTEXT, OPTIONS)
    assert "tie_word_embeddings" in error.value.message
    assert "set tie_word_embeddings to false" in str(error.value.hint)


def store_head(folder: Path, head: Callable[[Any], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    embeddings = next(weight for name, weight in weights.items() if "embed" in name and name.endswith("weight"))
    save_file({**weights, "lm_head.weight": head(embeddings)}, folder / "model.safetensors", metadata={"format": "pt"})
