"""Configurations that a framework computes otherwise than they state, until disagg's patches have set it right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.engines.architectures.configs.layers import SPECIAL_LAYERS
from tests.engines.architectures.configs.parts import LATENT
from tests.engines.architectures.configs.plain import PLAIN
from tests.engines.architectures.configs.states import WITH_STATES
from tests.tiny_models import ARCHITECTURES, WINDOW

_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
    "attention_factor": 1.2,
}

PATCHED: Mapping[str, dict[str, Any]] = {
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": WINDOW,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma3_text_wide": {**ARCHITECTURES["gemma3_text"], "hidden_size": 96},  # whose root bfloat16 does not hold
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "rope_scaling": _YARN,
    },
    "granitemoehybrid_groups": {
        "model_type": "granitemoehybrid",
        **WITH_STATES["granitemoehybrid"],
        "mamba_n_groups": 2,
        "position_embedding_type": None,
    },
    "qwen2_moe_normalised": {"model_type": "qwen2_moe", **PLAIN["qwen2_moe"], "norm_topk_prob": True},
    "deepseek_v3_halves": {
        "model_type": "deepseek_v3",
        **SPECIAL_LAYERS["deepseek_v3"],
        "rope_interleave": False,
    },
    "deepseek_v3_groups": {"model_type": "deepseek_v3", **SPECIAL_LAYERS["deepseek_v3"], "n_group": 2},
    "glm4_moe_lite_halves": {
        "model_type": "glm4_moe_lite",
        **SPECIAL_LAYERS["glm4_moe_lite"],
        **LATENT,
        "q_lora_rank": None,
        "rope_interleave": False,
    },
    "glm4_moe_lite_epsilon": {
        "model_type": "glm4_moe_lite",
        **SPECIAL_LAYERS["glm4_moe_lite"],
        "rms_norm_eps": 1e-3,
    },
    "mimo_v2_flash_epsilon": {
        "model_type": "mimo_v2_flash",
        **SPECIAL_LAYERS["mimo_v2_flash"],
        "layernorm_epsilon": 1e-3,
    },
    "qwen3_windowed": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    },
    "dots1_single": {"model_type": "dots1", **PLAIN["dots1"], "num_experts_per_tok": 1},
    "mamba_epsilon": {"model_type": "mamba", **WITH_STATES["mamba"], "layer_norm_epsilon": 1e-3},
    "gemma3n_scaled": {
        **SPECIAL_LAYERS["gemma3n"],
        "text_config": {
            **SPECIAL_LAYERS["gemma3n"]["text_config"],
            "rope_scaling": {**_YARN, "truncate": False},
        },
    },
    "glm": {"architectures": ["GlmForCausalLM"], "head_dim": 16, "partial_rotary_factor": 0.5},
}
