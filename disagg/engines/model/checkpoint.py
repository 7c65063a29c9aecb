"""A model's checkpoint on disk, read without torch or mlx: find it, check its files, compute its reference profile.

The reference profile uses only transformers' config classes and the formulas in `rope.py`, so every host gets the same
one from the same files, and both frameworks can be compared with it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from disagg.engines.model.checkpoint_files import check_weights
from disagg.engines.model.profile import LayerProfile, ModelProfile, Rope
from disagg.engines.model.rope import reference_rope
from disagg.engines.model.text import HFTokenizer
from disagg.errors import ModelError
from disagg.kv.fingerprint import Fingerprint, short_hash
from disagg.kv.layout import LayerLayout, Layout

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]

# Architectures whose attention applies rotary embedding on sliding layers only, which their config does not state.
_ROPE_ON_SLIDING_ONLY = {"cohere2", "exaone4"}


def resolve(source: str | Path) -> Path:
    """The folder of a checkpoint: `source` itself, or a hub id's snapshot (downloaded if it is not cached).
    ModelError if it is missing or damaged. Checks the header and size of every weight file; reads no weights."""
    path = Path(source).expanduser()
    if not path.is_dir():
        if path.exists() or not _HUB_ID.fullmatch(str(source)):
            raise ModelError(
                f"{source}: no such model folder",
                "give a folder with config.json, or a hub id owner/name; on a host of a fleet, run disagg models pull "
                "(disagg deploy copies models that are folders)",
            )
        path = _download(str(source))
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no config.json", "a model folder has config.json, weights and tokenizer files")
    check_weights(path)
    return path


def reference_profile(path: Path, context: int, tokenizer: HFTokenizer | None = None) -> ModelProfile:
    """The profile that the checkpoint in folder `path` describes, served with `context` tokens. tokenizer: that of the
    same folder, if it is already loaded. ModelError, with the reason, for a model whose KV cannot be handed over."""
    config = _load_config(path)
    _refuse_unsupported(path, config)
    _check_context(path, config, context)
    tokenizer = tokenizer or HFTokenizer.load(path)
    kinds = _layer_types(config)
    return ModelProfile(
        source="checkpoint",
        architecture=str(config.model_type),
        vocab_size=int(config.vocab_size),
        context=context,
        layers=tuple(LayerProfile(_layer_layout(config, kind), _rope(config, i, kind)) for i, kind in enumerate(kinds)),
        tokenizer=tokenizer.digest,
        chat_template=tokenizer.chat_template_digest,
        special_tokens=tokenizer.special_tokens_digest,
        eos_ids=tokenizer.eos_ids,
    )


def longest_context(path: Path) -> int | None:
    """The longest context, in tokens, that the checkpoint in folder `path` states; None if it states none."""
    return _longest_context(_load_config(path))


def layout(profile: ModelProfile, dtype: str) -> Layout:
    """The KV layout of a profile with keys and values in `dtype`."""
    return Layout(tuple(layer.layout for layer in profile.layers), dtype)


def fingerprint(profile: ModelProfile) -> Fingerprint:
    """The fingerprint of a profile. Rotary frequencies are compared to six significant digits."""
    layers = [_rope_text(layer.rope) for layer in profile.layers]
    return Fingerprint(
        architecture=profile.architecture,
        vocab_size=profile.vocab_size,
        rope=short_hash("\n".join(layers).encode()),
        tokenizer=profile.tokenizer,
        chat_template=profile.chat_template,
        special_tokens=profile.special_tokens,
    )


def _rope_text(rope: Rope | None) -> str:
    return "none" if rope is None else " ".join(f"{x:.6g}" for x in (rope.scale, *rope.inv_freq))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:  # the hub's errors are OSErrors; a bad id is a ValueError
        return Path(snapshot_download(hub_id, allow_patterns=_FILES, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{hub_id}: not in the local cache and not downloaded: {reason}",
            "check the id and the network, or give a folder; on hosts of a fleet: disagg models pull",
        ) from error


def _load_config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path / 'config.json'}: transformers cannot read it: {str(error).strip().splitlines()[0]}",
            "compare it with the model's original, or update transformers for a newer architecture",
        ) from error


def _refuse_unsupported(path: Path, config: Any) -> None:
    reasons = {
        "it is not a plain text model": config.get_text_config(decoder=True) is not config,
        "it has no attention layers of a known form": not hasattr(config, "num_attention_heads"),
        "latent attention (MLA) is not handed over": getattr(config, "kv_lora_rank", None),
        "its layers share keys and values": getattr(config, "num_kv_shared_layers", None),
        "its attention is bidirectional": getattr(config, "use_bidirectional_attention", None),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelError(
                f"{path}: model type {config.model_type!r} cannot be served: {reason}", "use another model"
            )


def _check_context(path: Path, config: Any, context: int) -> None:
    limit = _longest_context(config)
    if limit is not None and context > limit:
        raise ModelError(f"{path}: the model reads {limit} tokens, not {context}", f"set context to {limit} or less")


def _longest_context(config: Any) -> int | None:
    """max_position_embeddings, or more with a YaRN factor; None if no limit is stated."""
    limit = int(getattr(config, "max_position_embeddings", None) or 0)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":
        limit = max(limit, int((rope.get("factor") or 1) * rope.get("original_max_position_embeddings", 0)))
    return limit or None


def _layer_types(config: Any) -> list[str]:
    """One name per layer, by transformers' own rule: layer_types, else one kind for all layers, given by the window."""
    count = int(config.num_hidden_layers)
    given = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    kinds = list(given) if given else ["full_attention" if window is None else "sliding_attention"] * count
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != count or getattr(config, "attention_chunk_size", None):
        raise ModelError(
            f"model type {config.model_type!r} has layers that cannot be handed over: "
            + (", ".join(sorted(unknown)) or "chunked attention, or layer_types of another length"),
            "use a model of full and sliding-window attention layers",
        )
    return kinds


def _layer_layout(config: Any, kind: str) -> LayerLayout:
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    dim = _head_dim(config)
    if kind == "full_attention":
        return LayerLayout("full", heads, dim, dim)
    return LayerLayout("sliding", heads, dim, dim, window=int(config.sliding_window))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any, layer: int, kind: str) -> Rope | None:
    flags = getattr(config, "no_rope_layers", None)  # 1: this layer rotates, 0: it does not
    if flags and not flags[layer]:
        return None
    if config.model_type in _ROPE_ON_SLIDING_ONLY and config.sliding_window is not None and kind == "full_attention":
        return None
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return None
    if kind in parameters:  # one set per layer type
        parameters = parameters[kind]
    return reference_rope(parameters, _head_dim(config), int(config.max_position_embeddings))
