"""config.json of one tiny model per architecture, in the form of the hub's: what is added to tiny_models.COMMON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import ARCHITECTURES, COMMON, WINDOW, write_json

_THREE_TO_ONE = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_QWEN3_NEXT = {
    **_DELTA,
    **_EXPERTS,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _text(model_type: str, /, **text: Any) -> dict[str, Any]:
    """A multimodal checkpoint's config.json, of which only the text part is used."""
    inner = {**COMMON, "model_type": f"{model_type}_text", **text}
    return {"model_type": model_type, "text_config": inner, **{key: inner[key] for key in ("tie_word_embeddings",)}}


_QWEN3_5_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
_GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 640,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

CONFIGS: Mapping[str, dict[str, Any]] = {
    # layers with a state
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], **_QWEN3_NEXT},
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [2],
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
        "tie_embedding": True,
    },
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M-M*-",
        "num_hidden_layers": 5,
        "head_dim": 16,
        "layer_norm_epsilon": 1e-5,
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_bias": False,
        "mamba_proj_bias": False,
    },
    "kimi_linear": {
        "architectures": ["KimiLinearForCausalLM"],
        **_LATENT,
        "num_hidden_layers": 4,
        "q_lora_rank": None,
        "head_dim": 16,
        "mla_use_nope": True,
        "model_max_length": 8192,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 48,
        "num_shared_experts": 1,
        "first_k_dense_replace": 0,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "num_expert_group": 1,
        "topk_group": 1,
    },
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"],
        "head_dim": 16,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 1,
        "mamba_chunk_size": 16,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
    },
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **_GRANITE,
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "position_embedding_type": "nope",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    "qwen3_5": {"architectures": ["Qwen3_5ForCausalLM"], **_text("qwen3_5", **_DELTA, **_QWEN3_5_ROPE)},
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **_text("qwen3_5_moe", **_QWEN3_NEXT, **_QWEN3_5_ROPE),
    },
    "lfm2_moe": {
        "architectures": ["Lfm2MoeForCausalLM"],
        **_EXPERTS,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "use_expert_bias": True,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "tie_word_embeddings": True,
    },
    # latent attention
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **_LATENT, **_ROUTED},
    "glm4_moe_lite": {"architectures": ["Glm4MoeLiteForCausalLM"], **_LATENT, **_ROUTED},
    # layers of different sizes, or that share keys and values
    "gemma4_text": {"architectures": ["Gemma4ForCausalLM"], **_GEMMA4, "num_kv_shared_layers": 0},
    "gemma4_text_shared": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **_GEMMA4,
        "num_kv_shared_layers": 2,
    },
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        **_text("gemma3", **ARCHITECTURES["gemma3_text"]),
    },
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        **_text("mistral3", model_type="mistral", head_dim=16, sliding_window=None),
    },
    # plain attention
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        **_GRANITE,
        "mlp_bias": False,
    },
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"],
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": None,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "stablelm": {
        "architectures": ["StableLmForCausalLM"],
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": True,
        "partial_rotary_factor": 0.25,
    },
    "cohere": {
        "architectures": ["CohereForCausalLM"],
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    "exaone4": {
        "architectures": ["Exaone4ForCausalLM"],
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LLLG",
        "layer_types": _SLIDING,
        "rope_scaling": None,
    },
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], "head_dim": 16, "attention_bias": True},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 32,
        "rotary_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "shared_intermediate_size": 0,
        "use_qk_norm": True,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"], "head_dim": 16, "use_bias": False},
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "head_dim": 16,
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "moe_gate_act": "softmax",
        "moe_use_aux_free": True,
    },
    "hunyuan_v1_dense": {"architectures": ["HunYuanDenseV1ForCausalLM"], "head_dim": 16, "use_qk_norm": True},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "head_dim": 16, "partial_rotary_factor": 0.5},
    "helium": {"architectures": ["HeliumForCausalLM"], "head_dim": 16, "mlp_bias": False},
    "olmoe": {"architectures": ["OlmoeForCausalLM"], **_EXPERTS},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        **_EXPERTS,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "dots1": {"architectures": ["Dots1ForCausalLM"], **_ROUTED, "head_dim": 16, "sliding_window": None},
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **_GRANITE,
    },
    "nemotron": {
        "architectures": ["NemotronForCausalLM"],
        "norm_eps": 1e-5,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "hidden_act": "relu2",
        "mlp_bias": False,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "head_dim": 16,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "phi": {"architectures": ["PhiForCausalLM"], "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "gpt_neox": {
        "architectures": ["GPTNeoXForCausalLM"],
        "num_key_value_heads": 4,
        "attention_bias": True,
        "intermediate_size": 256,
        "layer_norm_eps": 1e-5,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
    },
}


def config(name: str) -> dict[str, Any]:
    """The whole config.json of a tiny model."""
    return {**COMMON, "model_type": name, **CONFIGS[name]}


PREFIXES: Mapping[str, str] = {
    "gemma3": "language_model.model.",
    "mistral3": "language_model.model.",
}
"""Of the weights of the text part in a multimodal checkpoint, if transformers does not build that part alone."""


def put_into_multimodal(config: Mapping[str, Any], folder: Path) -> None:
    """Rewrite a checkpoint of text as the text part of a multimodal one that has this config.json."""
    prefix = PREFIXES.get(config["model_type"], "language_model.model.")
    head = prefix.removesuffix("model.")
    weights = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else head + name: weight
        for name, weight in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def fuse_experts(folder: Path) -> None:
    """Rewrite a checkpoint whose experts transformers stored one by one as the hub's are: one tensor per layer."""
    weights = load_file(folder / "model.safetensors")
    layers = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for layer in layers:
        parts = {
            part: [
                weights.pop(f"{layer}.experts.{expert}.{part}_proj.weight")
                for expert in range(
                    sum(n.startswith(f"{layer}.experts.") and n.endswith(f"{part}_proj.weight") for n in weights)
                )
            ]
            for part in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        weights[f"{layer}.experts.gate_up_proj"] = torch.stack(both)
        weights[f"{layer}.experts.down_proj"] = torch.stack(parts["down"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
