"""The shape of a model from its config.json: no framework, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from disagg.errors import ModelError
from disagg.planning.shapes import ModelShape

# Architectures whose layers are what ModelShape describes. Others (latent or linear attention, shared experts) would
# be priced wrongly without a word.
DENSE: Final = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
MIXTURE: Final = ("qwen3_moe", "mixtral", "gpt_oss")


def read(path: Path) -> ModelShape:
    """The shape of the checkpoint in this folder (or of this config.json). ModelError where it cannot be told."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as a model's config.json: {error}", "name a model folder") from error
    try:
        return from_config(config, file.parent.name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{file}: not a config that a shape can be read from: {error!r}") from error


def from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a config.json describes; KeyError where something is missing, ModelError for an architecture
    that cannot be priced."""
    kind = config["model_type"]
    if kind not in (*DENSE, *MIXTURE) or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            f"{name}: the device model does not know the architecture {kind!r}",
            f"it knows {', '.join((*DENSE, *MIXTURE))}",
        )
    heads, width = int(config["num_attention_heads"]), int(config["intermediate_size"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0) if kind in MIXTURE else 0
    weight_bits, expert_bits = _bits(config)
    return ModelShape(
        name,
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        vocab=int(config["vocab_size"]),
        windows=_windows(config, kind),
        feed_forward=0 if experts else width,
        experts=experts,
        experts_per_token=int(config["num_experts_per_tok"]) if experts else 0,
        expert_width=int(config.get("moe_intermediate_size") or width) if experts else 0,
        tied=bool(config.get("tie_word_embeddings", False)),
        weight_bits=weight_bits,
        expert_bits=expert_bits,
        context=int(config.get("max_position_embeddings") or 131072),
    )


def _windows(config: Mapping[str, Any], kind: str) -> tuple[int | None, ...]:
    layers, window = int(config["num_hidden_layers"]), config.get("sliding_window")
    if kinds := config.get("layer_types"):
        if len(kinds) != layers:
            raise ValueError(f"{len(kinds)} layer_types for {layers} layers")
        return tuple(int(config["sliding_window"]) if each == "sliding_attention" else None for each in kinds)
    return ((int(window) if window and kind == "mistral" else None),) * layers


def _bits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Bits per weight as stored, of the experts and of all else."""
    if quantization := config.get("quantization"):  # mlx-lm: affine groups, a float16 scale and bias each
        bits = quantization["bits"] + 32 / quantization["group_size"]
        return bits, bits
    plain = 32.0 if "float32" in str(config.get("dtype") or config.get("torch_dtype")) else 16.0
    packed = (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    return plain, 4.25 if packed else plain
