"""Plain attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.engines.architectures.configs.parts import EXPERTS, GRANITE, MINISTRAL3, ROUTED, SLIDING
from tests.tiny_models import WINDOW

_GPT = {
    "num_key_value_heads": 4,
    "n_embd": 64,
    "n_layer": 4,
    "num_hidden_layers": 4,
    "n_head": 4,
    "n_positions": 8192,
    "n_ctx": 8192,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}

PLAIN: Mapping[str, dict[str, Any]] = {
    "olmo": {"architectures": ["OlmoForCausalLM"], "clip_qkv": 1.0},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        **GRANITE,
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
        "layer_types": SLIDING,
        "rope_scaling": None,
    },
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], "head_dim": 16, "attention_bias": True},
    "ministral3": {"architectures": ["Ministral3ForCausalLM"], **MINISTRAL3},
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
    "olmoe": {"architectures": ["OlmoeForCausalLM"], **EXPERTS},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        **EXPERTS,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "dots1": {"architectures": ["Dots1ForCausalLM"], **ROUTED, "head_dim": 16, "sliding_window": None},
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **GRANITE,
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
    # a learned vector of each position, or rotations from a table
    "gpt2": {"architectures": ["GPT2LMHeadModel"], **_GPT, "n_inner": None},
    "gpt_bigcode": {
        "architectures": ["GPTBigCodeForCausalLM"],
        **_GPT,
        "n_inner": 256,
        "attention_bias": True,
        "multi_query": True,
        "num_key_value_heads": 1,
        "activation_function": "gelu_pytorch_tanh",
    },
    "gptj": {"architectures": ["GPTJForCausalLM"], **_GPT, "rotary_dim": 8, "tie_word_embeddings": False},
}
