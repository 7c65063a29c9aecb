"""Latent attention; layers of different sizes, or that share keys and values; text parts of multimodal models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.engines.architectures.configs.parts import EXPERTS, LATENT, MINISTRAL3, ROUTED, text_part
from tests.tiny_models import ARCHITECTURES, WINDOW

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
_GEMMA3N = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 640,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "laurel_rank": 8,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}
_YARN = {
    "type": "yarn",
    "factor": 8.0,  # positions for every prompt, as published ones have
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_INDEXER = {"index_topk": 32, "index_n_heads": 16, "index_head_dim": 64}

_SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3]}  # of images, all alike for text
_QWEN2_VL = {
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 2,
}

SPECIAL_LAYERS: Mapping[str, dict[str, Any]] = {
    # latent attention
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **LATENT, **ROUTED},
    "glm4_moe_lite": {"architectures": ["Glm4MoeLiteForCausalLM"], **LATENT, **ROUTED},
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **LATENT,
        **ROUTED,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "norm_topk_prob": False,
        "rope_scaling": _YARN,
    },
    "minicpm3": {
        "architectures": ["MiniCPM3ForCausalLM"],
        **{key: value for key, value in LATENT.items() if key != "v_head_dim"},
        "rms_norm_eps": 1e-5,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 32,
        "tie_word_embeddings": True,
    },
    "mistral4": {
        "architectures": ["Mistral4ForCausalLM"],
        **LATENT,
        **ROUTED,
        "first_k_dense_replace": 0,
        "rope_parameters": {
            **_YARN,
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        },
    },
    # latent attention to the tokens that an indexer chooses
    "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"], **LATENT, **ROUTED, **_INDEXER},
    "glm_moe_dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        **LATENT,
        **ROUTED,
        **_INDEXER,
        "num_hidden_layers": 5,
        "index_topk_pattern": "FFSSF",
        "indexer_rope_interleave": True,
        "moe_layer_freq": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # layers of different sizes, or that share keys and values
    "mimo_v2_flash": {
        "architectures": ["MiMoV2FlashForCausalLM"],
        **ROUTED,
        "n_shared_experts": None,
        "num_hidden_layers": 4,
        "head_dim": 24,
        "v_head_dim": 16,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "sliding_window": WINDOW,
        "sliding_window_size": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "layernorm_epsilon": 1e-6,
        "rope_theta": 5000000.0,
        "swa_rope_theta": 10000.0,
        "partial_rotary_factor": 0.334,
        "attention_value_scale": 0.707,
    },
    "gemma4_text": {"architectures": ["Gemma4ForCausalLM"], **_GEMMA4, "num_kv_shared_layers": 0},
    "gemma4_text_shared": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **_GEMMA4,
        "num_kv_shared_layers": 2,
    },
    "gemma4": {
        "architectures": ["Gemma4ForConditionalGeneration"],
        **text_part("gemma4", **_GEMMA4, num_kv_shared_layers=2),
    },
    "gemma3n": {"architectures": ["Gemma3nForConditionalGeneration"], **text_part("gemma3n", **_GEMMA3N)},
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        **text_part("gemma3", **ARCHITECTURES["gemma3_text"]),
    },
    "llama4": {
        "architectures": ["Llama4ForConditionalGeneration"],
        **text_part(
            "llama4",
            num_hidden_layers=5,
            head_dim=16,
            intermediate_size_mlp=96,
            interleave_moe_layer_step=2,
            num_local_experts=4,
            num_experts_per_tok=1,
            attention_chunk_size=WINDOW,
            attn_temperature_tuning=True,
            floor_scale=50,
            attn_scale=0.1,
            use_qk_norm=True,
            rope_scaling=None,
            rms_norm_eps=1e-5,
        ),
    },
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        **text_part("mistral3", model_type="mistral", head_dim=16, sliding_window=None),
    },
    "mistral3_ministral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        **text_part("mistral3", model_type="ministral3", **MINISTRAL3),
    },
    "qwen2_vl": {"architectures": ["Qwen2VLForConditionalGeneration"], **text_part("qwen2_vl", **_QWEN2_VL)},
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **text_part("qwen2_5_vl", **_QWEN2_VL, tie_word_embeddings=True),
    },
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        **text_part("qwen3_vl", head_dim=16, rope_scaling={**_SECTIONS, "mrope_interleaved": True}),
    },
    "qwen3_vl_moe": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        **text_part(
            "qwen3_vl_moe",
            **EXPERTS,
            head_dim=16,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            rope_scaling={**_SECTIONS, "mrope_interleaved": True},
        ),
    },
}
