"""Shapes from config.json files."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disagg.api.keeper import ModelFacts
from disagg.errors import ModelError
from disagg.planning.checkpoint import config_size, facts, file_size
from disagg.planning.shapes import SHAPES
from tests import tiny_models
from tests.values import present

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
QWEN_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5472,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "sliding_window": None,
    "quantization": {"bits": 8, "group_size": 64},
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize(
    ("config", "name"), [(LLAMA, "llama-3.1-8b"), (QWEN_MOE, "qwen3-coder-30b"), (GPT_OSS, "gpt-oss-20b")]
)
def test_a_published_config_gives_the_catalogued_shape(config: dict[str, Any], name: str) -> None:
    known = replace(SHAPES[name], hub_ids=())
    if name == "gpt-oss-20b":
        known = replace(known, weight_bits=16.0)  # the checkpoint's own; the catalogue has the MXFP4-Q8 conversion
    assert config_size(config, name) == known


def test_a_windowed_mistral_has_a_window_on_every_layer() -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
    assert set(config_size(config, "m").windows) == {4096}
    assert set(config_size({**config, "sliding_window": None}, "m").windows) == {None}


def test_a_checkpoint_folder_is_read(tmp_path: Path) -> None:
    model = tiny_models.make("qwen3_moe", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    shape = file_size(model)
    assert (shape.name, shape.layers, shape.kv_heads) == (
        "model",
        config["num_hidden_layers"],
        config["num_key_value_heads"],
    )
    assert file_size(model / "config.json") == shape


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "nemotron_h"])
def test_an_architecture_that_would_be_priced_wrongly_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=f"does not support the architecture '{kind}'"):
        config_size({**LLAMA, "model_type": kind}, "x")


def test_a_mixture_with_dense_layers_in_between_is_refused() -> None:
    with pytest.raises(ModelError, match="does not support"):
        config_size({**QWEN_MOE, "mlp_only_layers": [0]}, "x")


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "llama"}', '{"model_type": "llama", "hidden_size": "x"}'])
def test_a_broken_config_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        file_size(tmp_path)


def test_a_missing_config_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        file_size(tmp_path / "nothing")


def test_nothing_else_parses_a_config_json() -> None:
    """By json itself: `read_object` does, and the frameworks. Two readings of one file have disagreed."""
    parsing = [
        str(path)
        for path in Path("disagg").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "loads")
        if any(isinstance(one, ast.Constant) and one.value == "config.json" for one in ast.walk(node))
    ]
    assert parsing == []


@pytest.mark.parametrize("template_in", ["tokenizer_config.json", "chat_template.jinja", None])
def test_a_checkpoint_states_its_size_its_parameters_and_what_its_chat_template_knows(
    tmp_path: Path, template_in: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16"}))
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 300)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 200)
    template = "{% if tools %}...{% endif %}<think>"
    if template_in is not None:
        body = template if template_in.endswith("jinja") else json.dumps({"chat_template": template})
        (tmp_path / template_in).write_text(body)
    found = present(facts(tmp_path))
    knows = template_in is not None
    assert (found.size_bytes, found.form, found.architecture) == (500, "bfloat16", "llama")
    assert (found.tools, found.reasons) == (knows, knows)
    assert found.parameters == config_size(LLAMA, "x").total_params


def test_of_an_architecture_that_is_not_known_parameters_follow_from_the_size(tmp_path: Path) -> None:
    assert facts(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "new", "dtype": "float16", "max_position_embeddings": 512}')
    (tmp_path / "model.safetensors").write_bytes(b"x" * 500)
    assert facts(tmp_path) == ModelFacts(
        size_bytes=500, parameters=250, form="float16", architecture="new", context=512
    )
    (tmp_path / "config.json").write_text('{"quantization": {"bits": 4}, "text_config": 3, "model_type": []}')
    assert present(facts(tmp_path)).parameters == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"num_hidden_layers": 10**12},
        {"model_type": "x" * 5000},
        {"max_position_embeddings": 10**30},
        {"vocab_size": 10**30},
        {"vocab_size": -(10**30)},
    ],
    ids=["layers", "name", "context", "vocabulary", "less than none"],
)
def test_what_no_model_is_harms_nobody_who_lists_models(tmp_path: Path, changed: dict[str, Any]) -> None:
    """A keeper states the facts of all its models at once."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changed))
    found = facts(tmp_path)
    assert found is None or ModelFacts.from_bytes(found.to_bytes()) == found


def test_a_config_that_is_nested_without_end_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type":' + "[" * 100_000)
    assert facts(tmp_path) is None
