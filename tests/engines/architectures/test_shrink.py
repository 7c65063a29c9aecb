"""tests/surveys/shrink.py: a default configuration becomes a tiny one of the same kind."""

from __future__ import annotations

from tests.surveys.shrink import MOST_LAYERS, shrunk

DEFAULT = {
    "model_type": "any",
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": [16384] * 12,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 9,
    "sliding_window": 4096,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_routed_experts": 256,
    "q_lora_rank": None,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "_name_or_path": "",
}


def test_sizes_become_small_and_the_rest_stays() -> None:
    assert shrunk(DEFAULT) == {
        "model_type": "any",
        "vocab_size": 640,
        "hidden_size": 64,
        "intermediate_size": [96] * 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "sliding_window": 64,
        "moe_intermediate_size": 48,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "q_lora_rank": None,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }


def test_a_rope_that_a_theta_does_not_describe_stays_whole() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4096}
    assert shrunk({**DEFAULT, "rope_parameters": rope})["rope_parameters"] == {
        **rope,
        "original_max_position_embeddings": 2048,
    }


def test_layers_are_not_many_although_a_kind_comes_late() -> None:
    late = ["full_attention"] * 11 + ["sliding_attention"]
    assert shrunk({**DEFAULT, "layer_types": late})["num_hidden_layers"] == MOST_LAYERS


def test_of_what_is_stated_for_single_layers_only_that_of_the_layers_that_are_left_stays() -> None:
    special = {"per_layer_config": {2: {"head_dim": 512}, "11": {"head_dim": 512}}}
    assert shrunk({**DEFAULT, **special})["per_layer_config"] == {2: {"head_dim": 16}}
