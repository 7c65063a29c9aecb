"""Models whose sliding layers differ in what their configuration does not state: only these rotate, or they have twice
the heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from disagg.api.layout import LayerLayout
from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import (
    Architecture,
    Config,
    ReadByVLLM,
    full,
    head_dim,
    plain_rope,
    sliding,
)
from disagg.engines.model.profile import Rope


def _rope_on_sliding_layers(config: Config, layer: int, kind: str) -> Rope | None:
    """Rotary embedding on sliding layers only, which the configuration does not state."""
    if config.sliding_window is not None and kind == "full_attention":
        return None
    return plain_rope(config, layer, kind)


def _own_values(config: Config) -> LayerLayout:
    """mimo_v2_flash: values of a width of their own."""
    return replace(full(config), value_dim=int(config.v_head_dim))


def _twice_the_heads(config: Config) -> LayerLayout:
    """Its sliding layers."""
    layout = sliding(config)
    return replace(layout, kv_heads=2 * layout.kv_heads, value_dim=int(config.v_head_dim))


def _in_other_words(config: Config) -> Mapping[str, Any]:
    """exaone_moe: the hub's config.json states the width of heads and which layers have experts, and transformers
    follows other keys."""
    return {"head_dim": head_dim(config), "is_moe_layer": [kind == "sparse" for kind in config.mlp_layer_types]}


def _pattern(config: Config) -> Mapping[str, Any]:
    """exaone4: a letter for each layer. Of layers of one kind mlx-lm takes none; their windows and ropes are set from
    the reference then."""
    kinds = list(config.layer_types)
    letters = "".join("L" if kind == "sliding_attention" else "G" for kind in kinds)
    return {"sliding_window_pattern": letters if len(set(kinds)) > 1 else None}


def _in_numbers(config: Config) -> Mapping[str, Any]:
    """mimo_v2_flash: which layers slide, and which have experts; and its epsilon by the name of published ones."""
    return {
        "layernorm_epsilon": getattr(config, "layernorm_epsilon", config.rms_norm_eps),
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config.layer_types],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
    }


_SLIDING_ROPE = Architecture(rope=_rope_on_sliding_layers)

ARCHITECTURES = {
    "cohere2": _SLIDING_ROPE,
    "exaone4": replace(_SLIDING_ROPE, mlx_arguments=_pattern),
    "exaone_moe": replace(_SLIDING_ROPE, mlx_arguments=_in_other_words),
    "afmoe": _SLIDING_ROPE,
    "mimo_v2_flash": Architecture(
        kinds={"full_attention": _own_values, "sliding_attention": _twice_the_heads}, mlx_arguments=_in_numbers
    ),
}


def shorter_windows(read: ReadByVLLM) -> list[PreflightFinding]:
    """State cohere2's window as one token shorter: vLLM 0.32 adds one to it."""
    config = read.text_config
    if config.model_type != "cohere2" or config.sliding_window is None:
        return []
    read.overrides["sliding_window"] = int(config.sliding_window) - 1
    detail = f"vLLM adds one to windows of {config.sliding_window} tokens; set right"
    return [PreflightFinding("layer kinds", "patched", detail)]
