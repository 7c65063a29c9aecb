"""planning/verdicts.py: what is known of a model by its config.json, before anything else of it is here."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.config import EngineOptions
from disagg.planning.refusals import RULES, RULES_OF_VLLM
from disagg.planning.verdicts import SERIES, stated, verdict

MLX, TRANSFORMERS = EngineOptions("mlx", device="cpu"), EngineOptions("transformers", device="cpu")
LONG = {"max_position_embeddings": 131072}
UNKNOWN_TYPE = "refused: transformers 5.23 and mlx-lm 0.32 do not both know this model type"


def whole(outer: str, **part: Any) -> dict[str, Any]:
    return {"model_type": outer, "text_config": part}


@pytest.mark.parametrize(
    ("config", "engine", "shown"),
    [
        ({"model_type": "llama"}, "transformers", "exact"),
        ({"model_type": "llama"}, "mlx", "exact"),
        ({"model_type": "llama"}, "vllm", "exact"),
        ({"model_type": "qwen3"}, "vllm", "exact"),  # one of its rows, with a window on some layers, is refused
        ({"model_type": "nemotron_h"}, "transformers", "patched"),
        (whole("gemma3", model_type="gemma3_text"), "transformers", "exact"),
        (whole("gemma3", hidden_size=64), "transformers", "exact"),
        (whole("kimi_k25", model_type="kimi_k2"), "transformers", "exact"),  # transformers' name is another one
        (
            whole("gemma3", model_type="llama"),
            "mlx",
            "unknown: with a part of type llama it was not compared: disagg verify does",
        ),
        (whole("llama4", model_type="llama4_text"), "transformers", "patched"),
        (
            {"model_type": "llama4_text"},
            "transformers",
            "refused: mlx-lm has another model of this name, which attends to all tokens in every layer",
        ),
        ({"model_type": "minimax"}, "transformers", "refused: mlx-lm has another model of this name, MiniMax-M2"),
        (
            {"model_type": "t5", "is_encoder_decoder": True},
            "mlx",
            "refused: it is not a decoder alone",
        ),
        ({"model_type": "granite_speech_of_tomorrow"}, "transformers", UNKNOWN_TYPE),
        (whole("llava_next", model_type="llama"), "transformers", UNKNOWN_TYPE),
        ({"model_type": "bitnet"}, "transformers", "refused: mlx-lm 0.32 cannot load models of this type"),
        ({"model_type": "bitnet"}, "vllm", "refused: mlx-lm 0.32 cannot load models of this type"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.get("model_type")),
)
def test_a_config_is_enough_for_a_verdict(config: dict[str, Any], engine: str, shown: str) -> None:
    assert str(verdict(config, EngineOptions(engine, device="cpu"))) == shown


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "config.json: it names no model_type"),
        ({"model_type": 3}, "config.json: it names no model_type"),
        ({"model_type": "gemma3", "text_config": None}, "config.json: its text_config is empty"),
        ({"model_type": "gemma3", "text_config": []}, "config.json: its text_config is empty"),
        (
            {"model_type": "llama", "num_hidden_layers": 2**70},
            "config.json: num_hidden_layers is 1.18059e+21, more than 10,000",
        ),
        ({"model_type": "llama", "n_layer": 0}, "config.json: n_layer is 0, and no number of layers"),
        (
            {"model_type": "llama", "num_hidden_layers": 2, "layer_types": ["full_attention"]},
            "config.json: it has 2 layers and 1 layer_types",
        ),
        ({"model_type": "llama", "rope_scaling": "linear"}, "config.json: its rope_scaling is no table"),
    ],
    ids=["empty", "no name", "no text", "a list", "layers", "no layers", "kinds", "rope"],
)
def test_a_config_that_no_framework_reads_is_refused(config: dict[str, Any], why: str) -> None:
    found = verdict(config, MLX)
    assert (found.state, found.why, found.sure) == ("refused", why, True)


def test_values_of_another_form_than_the_rules_expect_are_judged_when_the_model_loads() -> None:
    assert verdict({"model_type": "deepseek_v32", "index_n_heads": "many"}, MLX).state == "unknown"
    assert verdict({"model_type": "mamba2", "time_step_limit": [1]}, MLX).state == "unknown"


@pytest.mark.parametrize(
    ("config", "device", "ranks", "state"),
    [
        ({"model_type": "qwen3_next"}, "cpu", 1, "near"),
        ({"model_type": "olmo_hybrid"}, "cpu", 1, "refused"),
        ({"model_type": "olmo_hybrid"}, "auto", 1, "unknown"),
        ({"model_type": "ernie4_5_moe"}, "cpu", 1, "refused"),
        ({"model_type": "ernie4_5_moe"}, "cuda", 1, "unknown"),
        ({"model_type": "minicpm3"}, "cuda", 1, "refused"),
        ({"model_type": "cohere2"}, "cuda", 1, "exact"),
        ({"model_type": "cohere2", "rms_norm_eps": 1e-5}, "cuda", 1, "refused"),
        ({"model_type": "falcon_h1", "mamba_proj_bias": True, "projectors_bias": True}, "cuda", 1, "exact"),
        ({"model_type": "falcon_h1", "mamba_proj_bias": True, "projectors_bias": True}, "cuda", 2, "refused"),
    ],
)
def test_a_verdict_with_vllm_depends_on_its_device_and_its_ranks(
    config: dict[str, Any], device: str, ranks: int, state: str
) -> None:
    found = verdict(config, EngineOptions("vllm", device=device, tensor_parallel=ranks))
    assert found.state == state
    if device != "cpu" and state != "refused":
        assert found.why == "tried on a CPU" or found.why.endswith("on CUDA it is checked when it loads")
    assert found.instead == ("use the engine transformers for this model" if state == "refused" else "")


@pytest.mark.parametrize(
    ("packed", "engine", "state"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "mlx", "exact"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "transformers", "refused"),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, "vllm", "refused"),
        ({"quantization_config": {"quant_method": "fp8"}}, "transformers", "exact"),
        ({"quantization_config": {"quant_method": "awq"}}, "transformers", "unknown"),
        ({"quantization_config": {"quant_method": "awq"}}, "vllm", "exact"),
        ({"quantization_config": {"quant_method": "gguf"}}, "mlx", "refused"),
    ],
)
def test_weights_in_a_form_that_the_engine_does_not_read_are_refused(
    packed: dict[str, Any], engine: str, state: str
) -> None:
    assert verdict({"model_type": "llama", **packed}, EngineOptions(engine, device="cpu")).state == state


@pytest.mark.parametrize(
    ("stated", "context", "shown"),
    [
        ({}, 0, "exact"),
        ({}, 131072, "exact"),
        ({}, 131073, "refused: the model reads 131072 tokens, not 131073"),
        ({"max_position_embeddings": 4096}, 8192, "refused: the model reads 4096 tokens, not 8192"),
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096},
            },
            16384,
            "exact",
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4}}, 16384, "exact"),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4}},
            16385,
            "refused: the model reads 16384 tokens, not 16385",
        ),
    ],
)
def test_a_context_that_the_model_does_not_read_is_refused(stated: dict[str, Any], context: int, shown: str) -> None:
    assert str(verdict({"model_type": "qwen2", **LONG, **stated}, MLX, context)) == shown


@pytest.mark.parametrize(("context", "state"), [(4096, "exact"), (4097, "refused"), (0, "refused")])
def test_a_longrope_is_served_within_its_first_context(context: int, state: str) -> None:
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    config = {"model_type": "phi3", **LONG, "original_max_position_embeddings": 4096, "rope_scaling": rope}
    assert verdict(config, MLX, context).state == state


@pytest.mark.parametrize(
    ("model_type", "rope", "state"),
    [
        ("qwen2_vl", {"type": "mrope", "mrope_section": [16, 24, 24]}, "exact"),
        ("qwen2_5_vl", {"type": "mrope", "mrope_section": [16, 24, 24]}, "exact"),
        ("qwen2", {"type": "mrope", "mrope_section": [16, 24, 24]}, "refused"),
        ("phi3", {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}, "exact"),
    ],
)
def test_a_rope_has_the_name_that_transformers_has_for_it(model_type: str, rope: dict[str, Any], state: str) -> None:
    assert verdict({"model_type": model_type, **LONG, "rope_scaling": rope}, MLX).state == state
    assert verdict(whole(model_type, **LONG, rope_scaling=rope), MLX).state == state


@pytest.mark.parametrize("model_type", [*RULES, *RULES_OF_VLLM])
def test_rules_are_decided_for_a_config_json_that_leaves_out_all_they_read(model_type: str) -> None:
    config = {"model_type": model_type}
    for engine in ("transformers", "vllm"):
        assert "unknown form" not in verdict(config, EngineOptions(engine, device="cpu")).why


def test_keys_that_are_left_out_have_transformers_defaults_and_those_of_another_name_are_found() -> None:
    assert stated({"model_type": "gemma2"}).attn_logit_softcapping == 50.0
    assert verdict({"model_type": "gemma2", "attn_logit_softcapping": None}, MLX).state == "refused"
    kimi = {"model_type": "kimi_linear", "num_experts_per_token": 1, "moe_renormalize": True}
    assert stated(kimi).num_experts_per_tok == 1
    assert verdict(kimi, MLX).why.startswith("mlx-lm ignores norm_topk_prob")
    assert verdict({**kimi, "moe_renormalize": False}, MLX).state == "exact"


def test_what_transformers_makes_of_other_keys_is_not_taken_for_a_default() -> None:
    small = {"model_type": "minicpm3", "hidden_size": 64, "num_attention_heads": 4}
    assert verdict(small, MLX).state == "patched"
    assert verdict({**small, "v_head_dim": 8}, MLX).state == "refused"


def test_a_refusal_by_config_json_is_sure_and_what_a_framework_did_with_a_tiny_model_is_not() -> None:
    assert verdict({"model_type": "minimax"}, TRANSFORMERS).sure
    assert not verdict({"model_type": "bitnet"}, TRANSFORMERS).sure
    assert not verdict({"model_type": "llama"}, TRANSFORMERS).sure
    assert set(SERIES) == {"transformers", "mlx-lm", "vllm"}
