"""What the files of a checkpoint say of its size: its KV, its parameters, how its weights are stored. No framework.

The only place that parses a config.json, but for the program that looks for models on hosts, which may have Python 3.8
(fleet/models/inventory_program.py), and the frameworks themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from disagg.api.base import InvalidValue
from disagg.api.keeper import ModelFacts
from disagg.api.layout import MAX_LAYERS, LayerLayout, Layout, StateTensor, uniform
from disagg.api.names import DTYPE_BYTES
from disagg.errors import ModelError
from disagg.planning.shapes import ModelShape

Packing = Literal["none", "fp8", "mxfp4", "mlx", "other"]

# Architectures that ModelShape describes. It would be wrong for latent or linear attention and shared experts.
DENSE: Final = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
MIXTURE: Final = ("qwen3_moe", "mixtral", "gpt_oss")
MXFP4_BITS: Final = 4.25
"""One 8-bit scale for 32 weights of 4 bits."""
_OF_STATES: Final = ("linear_attn_config", "hybrid_override_pattern", "conv_L_cache")
_OF_REASONING: Final = ("<think>", "enable_thinking", "reasoning_effort", "reasoning_content", "thinking")
_DELTA: Final = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A model as it is stored. shape: with the stored bits per parameter. sinks: its attention has sinks, which
    transformers computes with eager attention. nbytes: of the weight files, None if they are not at hand."""

    shape: ModelShape
    packing: Packing
    sinks: bool = False
    nbytes: int | None = None


def stored_weights(config: Mapping[str, Any], name: str, nbytes: int | None = None) -> StoredWeights | None:
    """What a config.json describes. None for an architecture whose size cannot be computed, or if it is malformed:
    loading it reports what is wrong with it."""
    try:
        return StoredWeights(
            config_size(config, name), packed(config)[0], config.get("model_type") == "gpt_oss", nbytes
        )
    except (KeyError, TypeError, ValueError, AttributeError, ModelError):
        return None


def read_object(path: Path, what: str = "", hint: str = "download the model again") -> dict[str, Any]:
    """The JSON object in a checkpoint's file. ModelError if the file is missing or not a JSON object."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read{what}: {error}", hint) from error
    if not isinstance(body, dict):
        raise ModelError(f"{path}: not a JSON object", hint)
    return body


def facts(folder: Path) -> ModelFacts | None:
    """What the files of a checkpoint say of it; None if its config.json cannot be read, or states what no model is."""
    try:
        config = read_object(folder / "config.json")
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except (OSError, ModelError):
        return None
    known = stored_weights(config, folder.name)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    template, text = _chat_template(folder), config.get("text_config")
    longest = (text if isinstance(text, Mapping) else config).get("max_position_embeddings")
    try:
        form = weights_form(config, dtype)
    except (KeyError, TypeError, AttributeError):
        form = ""
    width = DTYPE_BYTES.get(form)
    stated = {
        "size_bytes": size,
        "parameters": known.shape.total_params if known else size // width if width else 0,
        "form": form,
        "architecture": str(config.get("model_type") or ""),
        "context": longest if isinstance(longest, int) and longest > 0 else 0,
        "tools": "tools" in template,
        "reasons": any(word in template for word in _OF_REASONING),
    }
    try:
        return ModelFacts.from_json(stated)
    except InvalidValue:
        return None


def _chat_template(folder: Path) -> str:
    """The text of its chat template, of all if it has several; empty without one."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    try:
        return json.dumps(read_object(folder / "tokenizer_config.json").get("chat_template") or "")
    except ModelError:
        return ""


def file_size(path: Path) -> ModelShape:
    """The size in this config.json, or in that of this folder. Raises ModelError if it cannot be read."""
    file = path / "config.json" if path.is_dir() else path
    config = read_object(file, " as a model's config.json", "name a model folder")
    try:
        return config_size(config, file.parent.name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{file}: not a config that a shape can be read from: {error!r}") from error


def config_size(config: Mapping[str, Any], name: str) -> ModelShape:
    """The size that a config.json describes. Raises KeyError if a value is missing, ModelError for an unknown
    architecture."""
    kind = config["model_type"]
    if kind not in (*DENSE, *MIXTURE) or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ModelError(
            f"{name}: the device model does not support the architecture {kind!r}",
            f"supported: {', '.join((*DENSE, *MIXTURE))}",
        )
    layers, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    if layers > MAX_LAYERS:
        raise ValueError(f"{layers} layers")
    if kinds and len(kinds) != layers:
        raise ValueError(f"{len(kinds)} layer_types for {layers} layers")
    heads, width = int(config["num_attention_heads"]), int(config["intermediate_size"])
    head_dim = _head_dim(config, heads)
    if kv_layout(config, "bfloat16") is None or head_dim is None:
        raise ValueError("the size of its KV is not stated")
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0) if kind in MIXTURE else 0
    weight_bits, expert_bits, head_bits = _bits(config)
    return ModelShape(
        name,
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=_int(config, "num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab=int(config["vocab_size"]),
        windows=_windows(config, layers),
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


# Its KV


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str, tokens: int) -> float | None:
    """Bytes of KV per token of a prompt of `tokens` tokens, by a model's config.json. None if it does not state
    enough, or the model has another kind of KV."""
    layout = kv_layout(config, dtype)
    return layout.nbytes(tokens) / tokens if layout and tokens > 0 else None


def kv_layout(config: Mapping[str, Any], dtype: str) -> Layout | None:
    """The layout of the KV by a config.json; None if it does not state enough, or the model has another kind of KV."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    layers, heads = _int(config, "num_hidden_layers"), _int(config, "num_attention_heads")
    if not layers or not heads:
        return None
    windows = _windows(config, layers)
    if 0 not in windows and _has_states(config):  # which layers have one is stated in a form of this model type only
        return None
    head_dim, states = _head_dim(config, heads), _states(config) if 0 in windows else ()
    if not head_dim or states is None:
        return None
    if latent := _int(config, "kv_lora_rank"):
        whole = uniform(windows, 1, latent, dtype, states=states, value_dim=_int(config, "qk_rope_head_dim") or 0)
        return _with_indexes(whole, config)
    return uniform(windows, _int(config, "num_key_value_heads") or heads, head_dim, dtype, states=states)


def _with_indexes(whole: Layout, config: Mapping[str, Any]) -> Layout:
    """The same with the keys of the layers' indexers, if they have some: some layers take what an earlier one has
    chosen, and have none."""
    if not (dim := _int(config, "index_head_dim")):
        return whole
    kinds = config.get("indexer_types") or config.get("index_topk_pattern") or ()
    every, skipped = _int(config, "index_topk_freq") or 1, _int(config, "index_skip_topk_offset") or 2
    both: list[LayerLayout] = []
    for place, layer in enumerate(whole.layers):
        own = kinds[place] in ("full", "F") if place < len(kinds) else max(place - skipped + 1, 0) % every == 0
        both += (layer, LayerLayout("index", 1, dim)) if own else (layer,)
    return Layout(tuple(both), whole.dtype)


def _head_dim(config: Mapping[str, Any], heads: int) -> int | None:
    return _int(config, "head_dim") or (_int(config, "hidden_size") or 0) // heads or None


def _has_states(config: Mapping[str, Any]) -> bool:
    """Whether some layers keep a state: a delta net, a short convolution, Mamba."""
    return any(config.get(key) for key in config if key in _OF_STATES or key.startswith("mamba_"))


def _states(config: Mapping[str, Any]) -> tuple[StateTensor, ...] | None:
    """The state of one layer: of a gated delta net a float32 matrix per value head and a convolution's last inputs,
    counted in 16 bits; of a short convolution only these. None for other kinds."""
    if kernel := _int(config, "conv_L_cache"):
        return (StateTensor((kernel - 1, _int(config, "hidden_size") or 0), "bfloat16"),)
    keys, values, key_dim, value_dim, kernel = (_int(config, f"linear_{name}") for name in _DELTA)
    if not keys or not values or not key_dim or not value_dim or not kernel:
        return None
    inputs = StateTensor((kernel - 1, 2 * keys * key_dim + values * value_dim), "bfloat16")
    return StateTensor((values, key_dim, value_dim)), inputs


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window, kinds = _int(config, "sliding_window"), config.get("layer_types")
    interval = _int(config, "full_attention_interval")
    if not kinds and interval and config.get("linear_num_value_heads"):  # as on the hub, without layer_types
        return tuple(None if (layer + 1) % interval == 0 else 0 for layer in range(layers))
    if isinstance(kinds, list) and len(kinds) == layers:
        by_kind = {"full_attention": None, "indexed_attention": None, "sliding_attention": window}
        return tuple(by_kind.get(kind, 0) for kind in kinds)
    return (window if config.get("model_type") == "mistral" else None,) * layers


def _int(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


# How its weights are stored


def packed(config: Mapping[str, Any]) -> tuple[Packing, Mapping[str, Any]]:
    """How a checkpoint packs its weights, by its config.json, and the table in which it states that."""
    if by_mlx := config.get("quantization"):
        return "mlx", by_mlx
    table = config.get("quantization_config") or {}
    method = table.get("quant_method", "none")
    return next((known for known in get_args(Packing) if known == method), "other"), table


def weights_form(config: Mapping[str, Any], dtype: str, quantization: str | None = None) -> str:
    """`bfloat16`, `fp8`, `mxfp4` or `8-bit, groups of 64`. dtype: of weights that are not packed. quantization: the
    option of hosts.toml, which converts those."""
    packing, table = packed(config)
    if packing == "mlx":
        groups = [table, *(one for one in table.values() if isinstance(one, Mapping))]
        return " and ".join(dict.fromkeys(map(_group_form, groups)))
    if method := table.get("quant_method"):
        return f"{table['bits']}-bit {method}" if table.get("bits") else str(method)
    return quantization or dtype


def _bits(config: Mapping[str, Any]) -> tuple[float, float, float | None]:
    """Bits per parameter as stored: of attention and dense layers, of experts, of embeddings and output head."""
    packing, table = packed(config)
    if packing == "mlx":  # mlx-lm's form: one for all modules, and others by module name; experts are all alike
        own = [value for name, value in table.items() if "expert" in name and isinstance(value, Mapping)]
        common = _group_bits(table)
        return common, _group_bits(own[0]) if own else common, None
    unpacked = 32.0 if "float32" in str(config.get("dtype") or config.get("torch_dtype")) else 16.0
    if packing == "mxfp4":
        return unpacked, MXFP4_BITS, None
    if packing == "fp8":  # the scales, one for 128 x 128 weights, are below a thousandth of it
        return 8.0, 8.0, unpacked
    return unpacked, unpacked, None


def _group_form(one: Mapping[str, Any]) -> str:
    if one.get("mode", "affine") != "affine":
        return str(one["mode"])
    return f"{one['bits']}-bit, groups of {one['group_size']}"


def _group_bits(one: Mapping[str, Any]) -> float:
    if one.get("mode") == "mxfp4":
        return MXFP4_BITS
    return float(one["bits"] + 32 / one["group_size"])  # affine: each group has a float16 scale and bias
