"""What several configurations share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.tiny_models import COMMON

SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
ROUTED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
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
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GRANITE = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}


MINISTRAL3 = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 64,  # queries after these are scaled
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES: Mapping[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": {**_VISION, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "vision_config": {
            **_VISION,
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pooling_kernel_size": 2,
            "patch_size": 14,
            "position_embedding_size": 16,
        },
        "audio_config": None,
    },
    "mistral3": {
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 56, "patch_size": 14},
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
}
"""What config.json has of the part that reads images."""


def text_part(model_type: str, /, **text: Any) -> dict[str, Any]:
    """A multimodal checkpoint's config.json, of which only the text part is used."""
    inner = {**COMMON, "model_type": f"{model_type}_text", **text}
    whole = {"model_type": model_type, "text_config": inner, "tie_word_embeddings": inner["tie_word_embeddings"]}
    return whole | IMAGES.get(model_type, {})
