"""Loading through mlx-lm: the patches, and clear errors for what cannot be loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from transformers import AutoConfig

from disagg.config import DType, EngineOptions
from disagg.engines.mlx.engine import MLXDecodeEngine
from disagg.engines.mlx.load import _in_words, flat_config, load, select_device
from disagg.engines.model.architectures import float32_weights
from disagg.engines.model.architectures.experts import transposed_experts
from disagg.errors import ModelError
from tests.engines.mlx.mlx_parts import Engines, prompt, start
from tests.tiny_models import ARCHITECTURES, TinyModel

OPTIONS = EngineOptions("mlx", dtype="float32", device="cpu")
NESTED = ["llama3", "qwen3_moe", "phi3", "gpt_oss_yarn", "gemma3_text", "glm4_moe", "smollm3", "cohere2"]


@pytest.fixture
def copy(tiny: TinyModel, tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of a checkpoint, to be damaged."""
    return lambda architecture: shutil.copytree(tiny(architecture), tmp_path / architecture)


@pytest.mark.parametrize("architecture", NESTED)
def test_a_checkpoint_with_nested_rope_parameters_loads_as_its_flat_form(
    architecture: Any, copy: Callable[[str], Path], mlx_engine: Engines
) -> None:
    folder = copy(architecture)
    AutoConfig.from_pretrained(folder).save_pretrained(folder)  # the form transformers >= 5 writes
    assert "rope_theta" not in json.loads((folder / "config.json").read_text())
    engine = MLXDecodeEngine(folder, 8192, OPTIONS)

    assert engine.info.profile == mlx_engine(architecture).info.profile
    tokens = prompt(30)
    assert (
        start(engine, tokens, max_tokens=8).result() == start(mlx_engine(architecture), tokens, max_tokens=8).result()
    )
    engine.close()


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if "gpt_oss" not in a])
def test_a_hub_config_is_not_touched(architecture: Any, tiny: TinyModel) -> None:
    config = json.loads((tiny(architecture) / "config.json").read_text())

    assert flat_config(config) == {}


def test_float_experts_are_transposed_and_packed_ones_pass_untouched() -> None:
    weights = {
        "model.layers.0.mlp.experts.gate_up_proj": mx.arange(24).reshape(2, 3, 4),
        "model.layers.0.mlp.experts.gate_up_proj_bias": mx.zeros((2, 4)),
        "model.layers.0.mlp.experts.down_proj_blocks": mx.zeros((2, 3, 1, 16), dtype=mx.uint8),
    }

    mended = transposed_experts(weights)

    assert np.array_equal(
        np.array(mended.pop("model.layers.0.mlp.experts.gate_up_proj.weight")),
        np.arange(24).reshape(2, 3, 4).swapaxes(1, 2),
    )
    assert mended == {name: array for name, array in weights.items() if not name.endswith("gate_up_proj")}


def load_file(path: Path) -> dict[str, Any]:
    """The arrays of a safetensors file."""
    arrays: Any = mx.load(str(path))
    return dict(arrays)


def packed(folder: Path) -> dict[str, Any]:
    """Rewrite a float gpt_oss checkpoint as the hub's: experts in MXFP4. Returns the float weights they stand for."""
    weights: dict[str, Any] = load_file(folder / "model.safetensors")
    rounded: dict[str, Any] = {}
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        array = weights.pop(name).swapaxes(-1, -2)
        blocks, scales, *_ = mx.quantize(array, group_size=32, bits=4, mode="mxfp4")
        weights[f"{name}_blocks"] = blocks.view(mx.uint8).reshape(*scales.shape, 16)
        weights[f"{name}_scales"] = scales
        rounded[name] = mx.dequantize(blocks, scales, group_size=32, bits=4, mode="mxfp4").swapaxes(-1, -2)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return rounded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hub_checkpoint_with_mxfp4_experts_loads_packed_and_answers_like_its_weights(
    dtype: DType, copy: Callable[[str], Path], tiny: TinyModel, tmp_path: Path
) -> None:
    hub, floats = copy("gpt_oss"), shutil.copytree(tiny("gpt_oss"), tmp_path / "floats")
    weights = {**load_file(floats / "model.safetensors"), **packed(hub)}
    mx.save_safetensors(str(floats / "model.safetensors"), weights, {"format": "pt"})
    small = MLXDecodeEngine(hub, 8192, EngineOptions("mlx", dtype=dtype, device="cpu"))
    large = MLXDecodeEngine(floats, 8192, OPTIONS)

    tokens = prompt(40)
    difference = np.abs(np.array(small.logits(tokens, 10)) - np.array(large.logits(tokens, 10))).max()
    assert difference < {"float32": 1e-3, "bfloat16": 1.5}[dtype]
    assert small.info.layout.dtype == dtype
    assert small.info.memory_bytes < large.info.memory_bytes
    small.close()
    large.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_and_kv_take_the_dtype_of_the_host(dtype: DType, tiny: TinyModel) -> None:
    options = EngineOptions("mlx", dtype=dtype, device="cpu")
    engine = MLXDecodeEngine(tiny("qwen3"), 8192, options)

    assert engine.info.layout.dtype == dtype
    (token, *_) = [start(engine, prompt(20), max_tokens=2, logprobs=3)]
    token.result()
    first = token.tokens[0]
    assert first.top[0] == (first.id, first.logprob)
    assert -20 < first.top[2][1] <= first.top[1][1] <= first.logprob <= 0
    engine.close()


def test_what_transformers_keeps_in_float32_is_kept_in_mlx() -> None:
    assert "mlp.gate.weight" in float32_weights("ernie4_5_moe")
    assert {"A_log", "dt_bias"} <= {*float32_weights("bailing_hybrid")}
    assert float32_weights("llama") == ("e_score_correction_bias", "expert_bias")


def test_float_experts_in_bf16_on_the_cpu_are_refused_before_serving(tiny: TinyModel) -> None:
    options = EngineOptions("mlx", dtype="bfloat16", device="cpu")

    with pytest.raises(ModelError, match="mixture-of-experts model cannot run in bfloat16"):
        MLXDecodeEngine(tiny("qwen3_moe"), 8192, options)


def test_a_device_that_is_not_there_or_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_count", lambda device: 0)
    assert select_device("cpu") == select_device("auto") == mx.cpu
    with pytest.raises(ModelError, match="no device 'tpu'"):
        select_device("tpu")
    with pytest.raises(ModelError, match="finds no GPU"):
        select_device("gpu")


def test_more_threads_than_mlx_can_use_are_refused(tiny: TinyModel) -> None:
    options = EngineOptions("mlx", dtype="float32", device="cpu", threads=4)

    with pytest.raises(ModelError, match="threads = 4"):
        MLXDecodeEngine(tiny("llama"), 8192, options)


def test_a_missing_folder_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no"):
        MLXDecodeEngine(tmp_path / "nothing", 8192, OPTIONS)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path, dtype="float32", device=mx.cpu)


def test_a_config_that_is_not_json_is_a_model_error(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / "config.json").write_text("{")

    with pytest.raises(ModelError, match="not JSON"):
        load(folder, dtype="float32", device=mx.cpu)


def test_truncated_weights_are_a_model_error_from_either_check(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    with pytest.raises(ModelError, match="cannot be read"):
        load(folder, dtype="float32", device=mx.cpu)
    with pytest.raises(ModelError):
        MLXDecodeEngine(folder, 8192, OPTIONS)


def test_weights_of_another_shape_are_a_model_error(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))

    with pytest.raises(ModelError, match=r"mlx-lm cannot load .*: the weight \S+ has another shape than config.json"):
        load(folder, dtype="float32", device=mx.cpu)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 5}, r"18 weights that config.json describes are missing, model.layers.3.\S+ first"),
        ({"num_hidden_layers": 2}, r"its model has no place for 9 weights, model.layers.2.\S+ first"),
        ({"rms_norm_eps": None}, r"config.json leaves out rms_norm_eps"),
    ],
    ids=["missing", "left over", "no key"],
)
def test_what_mlx_lm_says_of_a_model_that_it_cannot_load_is_put_in_plain_words(
    changes: dict[str, Any], reason: str, copy: Callable[[str], Path]
) -> None:
    folder = copy("llama")
    config = json.loads((folder / "config.json").read_text()) | changes
    stated = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(stated))

    with pytest.raises(ModelError, match=reason):
        load(folder, dtype="float32", device=mx.cpu)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("'attention' is not in list"), "it expects a layer of the kind attention, and none is"),
        (KeyError("lm_head"), "neither config.json nor the weights have lm_head"),
        (TypeError("'>' not supported between 'NoneType' and 'int'"), "it does not take what config.json states, or"),
        (ValueError("Unsupported gate"), "it does not take what config.json states: Unsupported gate"),
    ],
)
def test_errors_of_programs_are_put_in_plain_words(error: Exception, words: str) -> None:
    assert _in_words(error).startswith(words)


def test_an_architecture_that_mlx_lm_lacks_is_a_model_error(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "abacus"}))

    with pytest.raises(ModelError, match="it does not know the model type abacus"):
        load(folder, dtype="float32", device=mx.cpu)


def test_active_bytes_are_the_weights_that_one_token_meets(tiny: TinyModel) -> None:
    """Counted by hand: of 640 x 64 embeddings nothing, of a mixture's experts the chosen ones."""
    for architecture in ("llama", "qwen3_moe"):
        config = json.loads((tiny(architecture) / "config.json").read_text())
        loaded = load(tiny(architecture), dtype="float32", device=mx.cpu)
        embeddings = 4 * config["vocab_size"] * config["hidden_size"]
        experts, chosen = config.get("num_experts", 0), config.get("num_experts_per_tok", 0)
        expert = 4 * 3 * config["hidden_size"] * config.get("moe_intermediate_size", 0)
        idle = config["num_hidden_layers"] * (experts - chosen) * expert

        assert loaded.active_bytes == loaded.memory_bytes - embeddings - idle
