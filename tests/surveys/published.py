"""Configurations of models as they are published, shrunk by ratio, and checkpoints of them in the hub's form.

published/*.json have config.json of each model, with every key it has there, but: "like" names a model that has all
other keys, "without" lists those of them that it has not; a list with one entry per layer is written "3*a 1*b",
repeated for all layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from disagg.planning.refusals import known_as
from tests.tiny_models import BOS_ID, END_OF_TURN_ID, EOS_ID, PAD_ID, VOCAB, write_json

LONGEST = 2048  # tokens that each tiny model reads
_LEAST_WINDOW = 24
_EXPERTS, _CHOSEN = 16, 4
_FOLDER = Path(__file__).parent / "published"
_RUN = re.compile(r"(\d+)\*(\S+)")
_DEPTHS = ("num_hidden_layers", "n_layer")
# Keys that transformers fills in if a published configuration leaves them out.
_NEEDED = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
_UNSTATED_PERIODS = {"gemma3_text": 6, "llama4_text": 4}


@cache
def published() -> Mapping[str, dict[str, Any]]:
    """config.json of each model."""
    written = {
        name: one for file in sorted(_FOLDER.glob("*.json")) for name, one in json.loads(file.read_text()).items()
    }
    return {name: _layered(_whole(name, written)) for name in written}


def _whole(name: str, written: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    own = dict(written[name])
    return _merged(_whole(own.pop("like"), written), own) if "like" in own else own


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: value for key, value in base.items() if key not in own.get("without", ())}
    for key, value in own.items():
        if key == "text_config" and key in base:
            merged[key] = _merged(base[key], value)
        elif key != "without":
            merged[key] = value
    return merged


def _layered(config: Mapping[str, Any]) -> dict[str, Any]:
    depth = _depth(config)
    return {key: _value(key, value, depth) for key, value in config.items()}


def _value(key: str, value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        factors = key == "rope_scaling"
        return {k: _cycled(v, 0) if factors else _value(k, v, _depth(value)) for k, v in value.items()}
    return _cycled(value, depth)


def _cycled(value: Any, depth: int) -> Any:
    """The list that is written "3*a 1*b", repeated until it has `depth` entries; 0: not repeated."""
    if not isinstance(value, str) or not (runs := _RUN.findall(value)) or not all(map(_RUN.fullmatch, value.split())):
        return value
    entries = [_entry(one) for count, one in runs for _ in range(int(count))]
    return [entries[i % len(entries)] for i in range(depth or len(entries))]


def _entry(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _depth(config: Mapping[str, Any]) -> int:
    return next((int(config[key]) for key in _DEPTHS if key in config), 0)


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model, tiny: widths, heads, experts and layers are divided, windows and lengths of contexts that ropes
    were trained with are small. All other keys are as they are."""
    if "text_config" in config:
        text = _shrunk(config["text_config"], str(config["model_type"]))
        return {**_tokens(config), "text_config": text} | _picture(config)
    return _shrunk(config, str(config["model_type"]))


def _picture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part that reads images, as the tests of multimodal checkpoints have it."""
    from tests.engines.architectures.configs.parts import IMAGES

    return {key: value for key, value in IMAGES.get(str(config["model_type"]), {}).items() if key in config}


def _shrunk(config: Mapping[str, Any], whole: str) -> dict[str, Any]:
    full = {**_stated(config), **config}
    sizes = _Sizes(full)
    made = {key: sizes.small(key, value) for key, value in full.items()}
    made |= _layers(full, made) | _positions(full, sizes) | {"vocab_size": VOCAB}
    return _tokens(made)


def _stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that this configuration leaves to transformers."""
    from transformers import CONFIG_MAPPING

    kind = known_as(str(config["model_type"]))
    if kind not in CONFIG_MAPPING or "num_attention_heads" in config or "linear_attn_config" in config:
        return {}
    default = CONFIG_MAPPING[kind]()
    if not hasattr(default, "num_attention_heads"):
        return {}
    return {key: getattr(default, key) for key in _NEEDED if getattr(default, key, None) is not None}


class _Sizes:
    """The sizes of one model, and of the tiny one. by_head: what widths of heads are divided by, such that a part of
    them that is rotated is even."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.hidden = config, int(config["hidden_size"])
        heads = int(config.get("num_attention_heads") or 0)
        self.kv = int(config.get("num_key_value_heads") or heads)
        dim = int(config.get("head_dim") or (self.hidden // heads if heads else 64))
        self.by_head = _divisor(dim, float(config.get("partial_rotary_factor") or 1.0))
        if config.get("qk_rope_head_dim"):
            self.by_head = 8 if config["qk_rope_head_dim"] >= 64 else 4
        self.few, self.few_kv = _few_heads(heads, self.kv)
        if not heads:
            self.few_hidden = self.hidden // 32
        elif config.get("head_dim") or config.get("kv_lora_rank"):
            self.few_hidden = max(64, round(self.hidden * self.few / heads / self.by_head / 4) * 4)
        else:
            self.few_hidden = self.few * (dim // self.by_head)
        if config.get("mamba_n_heads") or config.get("mamba_num_heads"):
            self.few_hidden = round(self.few_hidden / 16) * 16

    def small(self, key: str, value: Any) -> Any:
        if key == "linear_attn_config":
            return {**value, "num_heads": self.few, "head_dim": value["head_dim"] // 8}
        if isinstance(value, list) and key == "intermediate_size":
            return [self.small(key, one) for one in value]
        if not isinstance(value, int | float) or isinstance(value, bool) or not value:
            return value
        return next((rule(self, value) for keys, rule in _RULES if re.fullmatch(keys, key)), value)

    def mamba_heads(self, count: int, key: str) -> int:
        """So many that the widths of the state and of the model have the published ratio."""
        dim, config = int(self.config[key]), self.config
        groups = int(config.get("mamba_n_groups") or config.get("n_groups") or 1)
        return max(1, round(count * dim / self.hidden * self.few_hidden / (dim // 4) / groups)) * groups

    def mamba_width(self) -> int:
        return (
            self.mamba_heads(int(self.config["mamba_n_heads"]), "mamba_d_head") * int(self.config["mamba_d_head"]) // 4
        )

    def by_width(self, value: int) -> int:
        return max(8, round(value * self.few_hidden / self.hidden / 8) * 8)

    def heads_of_states(self, value: int) -> int:
        """mamba2's, or, beside attention, lfm2's other name of its heads."""
        return self.few if self.few else self.mamba_heads(value, "head_dim")


def _divisor(dim: int, turning: float) -> int:
    divisors = (8, 4) if dim >= 128 else (4, 2)
    return next((by for by in divisors if int(dim // by * turning) % 2 == 0), divisors[0])


def _few_heads(heads: int, kv: int) -> tuple[int, int]:
    """A few heads, and a few of keys and values, in the same ratio."""
    if not heads or heads % kv:
        return heads, kv
    ratio = heads // kv
    few = min(kv, 4 if ratio == 1 else 2)
    return few * ratio, few


_RULES: Sequence[tuple[str, Callable[[_Sizes, Any], Any]]] = (
    ("hidden_size|n_embd", lambda sizes, _: sizes.few_hidden),
    ("(swa_)?num_attention_heads", lambda sizes, _: sizes.few),
    ("num_key_value_heads", lambda sizes, _: sizes.few_kv),
    ("num_heads", _Sizes.heads_of_states),
    ("swa_num_key_value_heads|num_global_key_value_heads", lambda sizes, n: max(1, n * sizes.few_kv // sizes.kv)),
    ("attention_multiplier", lambda sizes, scale: scale * sizes.by_head),
    ("linear_(key|value)_head_dim", lambda sizes, dim: dim // 8),
    ("linear_num_(key|value)_heads", lambda sizes, n: n * 2 // int(sizes.config["linear_num_key_heads"])),
    ("mamba_head_dim|mamba_d_head", lambda sizes, dim: dim // 4),
    ("mamba_num_heads", lambda sizes, n: sizes.mamba_heads(n, "mamba_head_dim")),
    ("mamba_n_heads", lambda sizes, n: sizes.mamba_heads(n, "mamba_d_head")),
    ("mamba_d_ssm", lambda sizes, _: sizes.mamba_width()),
    ("(.*_)?head_dim|query_pre_attn_scalar|rotary_dim", lambda sizes, n: n // (sizes.by_head if sizes.few else 4)),
    (
        "(q|kv)_lora_rank|laurel_rank|dim_model_base|hidden_size_per_layer_input",
        lambda sizes, n: n // 16 if n >= 512 else max(8, n // 8),
    ),
    ("mamba_d_state|ssm_state_size|state_size", lambda sizes, n: n // 8 if n >= 64 else n),
    (
        "(.*_)?intermediate_size(_mlp)?|block_(ff_)?dim|block_multiple_of|conv_dim(_out)?|d_inner|d_model|mamba_dt_rank"
        "|time_step_rank",
        _Sizes.by_width,
    ),
    (
        "sliding_window(_size)?|attention_chunk_size|floor_scale|index_topk",
        lambda sizes, n: max(_LEAST_WINDOW, n // 64),
    ),
    ("num_experts|n_routed_experts|num_local_experts|moe_num_experts", lambda sizes, n: min(n, _EXPERTS)),
    (
        "num_experts_per_tok(en)?|experts_per_token|moe_k|top_k_experts",
        lambda sizes, n: min(n, _CHOSEN),
    ),
)
"""What becomes of the sizes with these names, of which the first fits: the pattern of the whole name, the tiny size."""


def _layers(full: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """So many layers that each kind occurs; lists of one entry per layer are cut."""
    depth = _depth(full)
    lists = {key: one for key, one in full.items() if isinstance(one, list | str) and _per_layer(key, one, depth)}
    count = max([4, *(_enough(one) for one in lists.values()), *_periods(full)])
    shared = int(full.get("num_kv_shared_layers") or 0)
    period = _enough(full["layer_types"]) if shared else 0
    count = min(depth, count + period)
    cut: dict[str, Any] = {key: made[key][:count] for key in lists}
    cut |= {key: count for key in _DEPTHS if key in full}
    if shared:
        cut["num_kv_shared_layers"] = count - period
    for key in ("first_k_dense_replace", "num_dense_layers"):
        if full.get(key):
            cut[key] = min(int(full[key]), 2)
    if "max_window_layers" in full:
        cut["max_window_layers"] = min(count, int(full["max_window_layers"]))
    if "full_attn_idxs" in full:
        cut["full_attn_idxs"] = [one for one in full["full_attn_idxs"] if one < count]
    if "linear_attn_config" in full:
        linear = made["linear_attn_config"]
        places = {key: [one for one in linear[key] if one <= count] for key in ("full_attn_layers", "kda_layers")}
        cut["linear_attn_config"] = {**linear, **places}
    return cut


def _per_layer(key: str, value: Any, depth: int) -> bool:
    return len(value) == depth and (isinstance(value, list) or key == "hybrid_override_pattern")


def _enough(kinds: Any) -> int:
    """So many layers that each kind has occurred."""
    first = {one: at for at, one in reversed(list(enumerate(kinds)))}
    return int(max(first.values())) + 1


def _periods(full: Mapping[str, Any]) -> list[int]:
    keys = ("full_attention_interval", "attn_layer_period", "no_rope_layer_interval", "sliding_window_pattern")
    found = [int(full[key]) for key in keys if isinstance(full.get(key), int)]
    found += [one + 1 for one in (full.get("full_attn_idxs") or [])[:2]]
    found += (full.get("linear_attn_config") or {}).get("full_attn_layers", [])[:1]
    return [*found, _UNSTATED_PERIODS.get(str(full["model_type"]), 0)]


def _positions(full: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Ropes that were trained with short contexts, which are stretched by the published factors."""
    key = "rope_parameters" if full.get("rope_parameters") else "rope_scaling"
    rope = dict(full.get(key) or {})
    if "mrope_section" in rope:
        rope["mrope_section"] = [2, 1, 1]
    for factors in ("short_factor", "long_factor"):
        if factors in rope:
            rope[factors] = rope[factors][:: sizes.by_head]
    longest = int(full.get("max_position_embeddings") or 0)
    original = int(rope.get("original_max_position_embeddings") or 0)
    if not original and "short_factor" in rope:
        original = int(full.get("original_max_position_embeddings") or 0)
    if not original or not longest:
        return {key: rope} if rope else {}
    short = max(256, int(LONGEST // float(rope.get("factor") or longest / original)))
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = short
    made: dict[str, Any] = {key: rope, "max_position_embeddings": longest * short // original}
    others = ("original_max_position_embeddings", "initial_context_length")
    return made | {one: short for one in others if one in full}


def context(config: Mapping[str, Any]) -> int:
    """So many tokens that a tiny model is served with: of one whose rope has a set for long prompts, as many as the
    other set is for."""
    text = config.get("text_config", config)
    rope = text.get("rope_scaling") or {}
    if rope.get("short_factor") == rope.get("long_factor"):
        return LONGEST
    return int(rope.get("original_max_position_embeddings") or text["original_max_position_embeddings"])


def _tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """With tokens of the tiny vocabulary where the published ones stand, in the same form."""
    from transformers import CONFIG_MAPPING

    ours = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    kind = known_as(str(config["model_type"]))
    default = CONFIG_MAPPING[kind]() if kind in CONFIG_MAPPING else None
    known: dict[str, Any] = {
        key: one for key, one in ours.items() if config.get(key, getattr(default, key, None)) is not None
    }
    if isinstance(config.get("eos_token_id"), list):
        known["eos_token_id"] = [EOS_ID, END_OF_TURN_ID]
    return {**config, **known}


# The names under which the hub's multimodal checkpoints have their text part, and its output head.
_PREFIXES = {"qwen3_5": ("model.language_model.", "lm_head."), "qwen3_5_moe": ("model.language_model.", "lm_head.")}


def make(config: Mapping[str, Any], folder: Path) -> None:
    """A checkpoint with this config.json, and with the weights that published ones have beside those that are used."""
    from tests.engines.architectures import pairs

    kind = str(config["model_type"])
    if kind in _PREFIXES:
        _make_text_part(config, folder)
    else:  # of a type that transformers knows under another name, with that one
        pairs.make({**config, "model_type": known_as(kind)}, folder)
        write_json(folder / "config.json", config)
    if kind == "kimi_linear":
        _name_dense_layers(folder)
    _add_weights_of_drafts(config, folder)


def _name_dense_layers(folder: Path) -> None:
    """Give kimi_linear's layers without experts the hub's name: transformers writes that of the others."""
    dense = re.compile(r"block_sparse_moe\.(gate|up|down)_proj\.")
    _save(
        {dense.sub(r"mlp.\1_proj.", name): one for name, one in load_file(folder / "model.safetensors").items()}, folder
    )


def _make_text_part(config: Mapping[str, Any], folder: Path) -> None:
    from tests.engines.architectures.configs.rewrite import fuse_experts
    from tests.tiny_models import make_from

    make_from(config["text_config"], folder)
    if config["model_type"] == "qwen3_5_moe":
        fuse_experts(folder)
    prefix, head = _PREFIXES[str(config["model_type"])]
    named = {
        head + name.removeprefix("lm_head.")
        if name.startswith("lm_head.")
        else prefix + name.removeprefix("model."): one
        for name, one in load_file(folder / "model.safetensors").items()
    }
    _save(named, folder)
    write_json(folder / "config.json", config)


def _add_weights_of_drafts(config: Mapping[str, Any], folder: Path) -> None:
    """Weights that draft tokens (MTP), where published checkpoints have them: none is used."""
    text = config.get("text_config", config)
    weights, width = load_file(folder / "model.safetensors"), int(text["hidden_size"])
    more: dict[str, torch.Tensor] = {}
    if text.get("num_nextn_predict_layers"):
        last = int(text["num_hidden_layers"])
        before = f"model.layers.{last - 1}."
        more = {name.replace(before, f"model.layers.{last}."): one for name, one in weights.items() if before in name}
        more[f"model.layers.{last}.eh_proj.weight"] = torch.ones(width, 2 * width)
        more[f"model.layers.{last}.enorm.weight"] = torch.ones(width)
    if text.get("mtp_num_hidden_layers") or text["model_type"] == "qwen3_next":
        more = {"mtp.fc.weight": torch.ones(width, 2 * width), "mtp.norm.weight": torch.ones(width)}
    if more:
        _save(weights | {name: one.clone() for name, one in more.items()}, folder)


def _save(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
