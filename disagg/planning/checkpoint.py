"""The shape of a model from its config.json: no framework, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from disagg.errors import ModelError
from disagg.planning.kv import kv_shape
from disagg.planning.shapes import ModelShape

# Architectures that ModelShape describes. It would be wrong for latent or linear attention and shared experts.
DENSE: Final = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
MIXTURE: Final = ("qwen3_moe", "mixtral", "gpt_oss")
MXFP4_BITS: Final = 4.25
"""One 8-bit scale for 32 weights of 4 bits."""


def read(path: Path) -> ModelShape:
    """The shape of the checkpoint in this folder, or of this config.json. Raises ModelError if it cannot be read."""
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
    """The shape in a config.json. Raises KeyError if a value is missing, ModelError for an unknown architecture."""
    kind = config["model_type"]
    if kind not in (*DENSE, *MIXTURE) or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            f"{name}: the device model does not support the architecture {kind!r}",
            f"supported: {', '.join((*DENSE, *MIXTURE))}",
        )
    layers, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    if kinds and len(kinds) != layers:
        raise ValueError(f"{len(kinds)} layer_types for {layers} layers")
    if (kv := kv_shape(config)) is None:
        raise ValueError("the size of its KV is not stated")
    heads, width = int(config["num_attention_heads"]), int(config["intermediate_size"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0) if kind in MIXTURE else 0
    weight_bits, expert_bits, head_bits = _bits(config)
    return ModelShape(
        name,
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        vocab=int(config["vocab_size"]),
        windows=kv.windows,
        feed_forward=0 if experts else width,
        experts=experts,
        experts_per_token=int(config["num_experts_per_tok"]) if experts else 0,
        expert_width=int(config.get("moe_intermediate_size") or width) if experts else 0,
        tied=bool(config.get("tie_word_embeddings", False)),
        weight_bits=weight_bits,
        expert_bits=expert_bits,
        head_bits=head_bits,
        context=int(config.get("max_position_embeddings") or 131072),
    )


def _bits(config: Mapping[str, Any]) -> tuple[float, float, float | None]:
    """Bits per parameter as stored: of attention and dense layers, of experts, of embeddings and output head."""
    if quantization := config.get("quantization"):
        return _mlx_bits(quantization)
    unpacked = 32.0 if "float32" in str(config.get("dtype") or config.get("torch_dtype")) else 16.0
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method == "mxfp4":
        return unpacked, MXFP4_BITS, None
    if method == "fp8":  # the scales, one for 128 x 128 weights, are below a thousandth of it
        return 8.0, 8.0, unpacked
    return unpacked, unpacked, None


def _mlx_bits(quantization: Mapping[str, Any]) -> tuple[float, float, float | None]:
    """mlx-lm's form: one for all modules, and others by module name. Experts are taken to be all alike."""
    own = [value for name, value in quantization.items() if "expert" in name and isinstance(value, Mapping)]
    common = _group_bits(quantization)
    return common, _group_bits(own[0]) if own else common, None


def _group_bits(one: Mapping[str, Any]) -> float:
    if one.get("mode") == "mxfp4":
        return MXFP4_BITS
    return float(one["bits"] + 32 / one["group_size"])  # affine: each group has a float16 scale and bias
