"""A tiny config.json from the default configuration that transformers has for a model type. Pure.

Sizes become small by their names; lists with one entry per layer are cut where every kind of entry has occurred.
Everything else stays: what a model type does by default is what is tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.tiny_models import BOS_ID, EOS_ID, PAD_ID, VOCAB, WINDOW

MOST_LAYERS = 8

# The first pattern that fits the whole name of a key. A value that is None, 0 or False stays.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_per_layer_input)?", VOCAB),
    (r"hidden_size_per_layer_input", 8),
    (r"hidden_size|n_embd|d_model|lru_width", 64),
    (r"(.*moe.*|.*expert.*|shared)_(intermediate|ffn_hidden)_size", 48),
    (r"(.*_)?intermediate_size(_mlp)?|n_inner|ffn_hidden_size", 96),
    (r"num_attention_heads|n_heads?", 4),
    (r"(global_)?head_dim|.*_head_dim|mamba_d_head|mamba_head_dim|rotary_dim", 16),
    (r"linear_num_key_heads|num_(global_)?key_value_heads|kv_n_heads|index_n_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_d_state|ssm_state_size|state_size", 16),
    (r"mamba_n_groups|n_groups?|num_expert_group|topk_group", 1),
    (r"mamba_chunk_size|chunk_size", 16),
    (r"q_lora_rank", 24),
    (r"kv_lora_rank", 32),
    (r"(n_routed|num|num_local|moe_num|n_shared|zero)_experts?(_num)?|expert_num", 4),
    (r"num_experts_per_tok|moe_(topk|top_k|k)|num_selected_experts", 2),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len", 8192),
    (r"sliding_window|attention_window_size|attention_chunk_size", WINDOW),
    (r"index_topk", 4096),
    (r"original_max_position_embeddings", 2048),
)
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_TOKENS = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
_SIMPLE_ROPE = {"rope_type", "rope_theta", "partial_rotary_factor"}

# What mlx-lm wants in the hub's form, or what must fit the other sizes.
EXTRA: Mapping[str, dict[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "bailing_hybrid": {"head_dim": 16},
    "deepseek_v3": {"num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "laguna": {"num_attention_heads_per_layer": None},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "solar_open": {"intermediate_size": 96, "first_k_dense_replace": 0, "partial_rotary_factor": 1.0},
}


def shrunk(default: Mapping[str, Any]) -> dict[str, Any]:
    """A tiny configuration in the hub's form. default: of transformers' text configuration, as a mapping."""
    depth = next((int(default[key]) for key in _DEPTHS if default.get(key)), 0)
    layers = _enough_layers(default, depth)
    tiny = {key: _small(key, value, depth, layers) for key, value in default.items() if not key.startswith("_")}
    tiny |= {key: layers for key in _DEPTHS if key in default} | _TOKENS | {"torch_dtype": "float32"}
    return {**_flat_rope(tiny), **EXTRA.get(str(default.get("model_type")), {})}


def _enough_layers(default: Mapping[str, Any], depth: int) -> int:
    """So many that every kind of layer occurs, within reason."""
    needed = [2]
    for value in default.values():
        if isinstance(value, list) and len(value) == depth:
            needed += [value.index(kind) + 1 for kind in value]
    return min(max(needed), MOST_LAYERS)


def _small(key: str, value: Any, depth: int, layers: int) -> Any:
    if isinstance(value, list) and len(value) == depth:
        return [_small(key, entry, -1, layers) for entry in value[:layers]]
    if isinstance(value, Mapping):
        kept = {inner: entry for inner, entry in value.items() if not (_is_index(inner) and int(inner) >= layers)}
        return {inner: _small(str(inner), entry, depth, layers) for inner, entry in kept.items()}
    if not value or isinstance(value, bool | str | list):
        return value
    return next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), value)


def _is_index(key: object) -> bool:
    """Of a layer: 11, or "11"."""
    return str(key).isdecimal()


def _flat_rope(tiny: dict[str, Any]) -> dict[str, Any]:
    """With rope_theta and partial_rotary_factor beside the other keys, as on the hub, unless the rope is of a kind that
    needs more."""
    rope = tiny.get("rope_parameters")
    if not isinstance(rope, Mapping) or not set(rope) <= _SIMPLE_ROPE or rope.get("rope_type", "default") != "default":
        return tiny
    flat = {key: value for key, value in rope.items() if key != "rope_type"}
    return {key: value for key, value in tiny.items() if key != "rope_parameters"} | flat
