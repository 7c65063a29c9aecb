"""What several configurations share."""

from __future__ import annotations

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


def text_part(model_type: str, /, **text: Any) -> dict[str, Any]:
    """A multimodal checkpoint's config.json, of which only the text part is used."""
    inner = {**COMMON, "model_type": f"{model_type}_text", **text}
    return {"model_type": model_type, "text_config": inner, **{key: inner[key] for key in ("tie_word_embeddings",)}}
