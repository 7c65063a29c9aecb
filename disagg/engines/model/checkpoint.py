"""A model's checkpoint on disk, read without torch or mlx: find it, check its files, compute its reference profile.

The reference profile uses only transformers' config classes and the formulas in `rope.py`, so every host gets the same
one from the same files, and both frameworks can be compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from disagg.api.layout import LayerLayout, Layout
from disagg.engines.model.architectures import architecture_of, vllm
from disagg.engines.model.architectures.base import MODEL_DTYPE
from disagg.engines.model.checkpoint_files import check_weights
from disagg.engines.model.profile import LayerProfile, ModelProfile, Rope
from disagg.engines.model.text import HFTokenizer
from disagg.errors import ModelError, first_line
from disagg.kv.fingerprint import Fingerprint, short_hash

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


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
    config = _text_config(path)
    _refuse_unsupported(path, config)
    _check_context(path, config, context)
    layers = _layers(path, config)
    tokenizer = tokenizer or HFTokenizer.load(path)
    return ModelProfile(
        source="checkpoint",
        architecture=str(config.model_type),
        vocab_size=int(config.vocab_size),
        context=context,
        layers=layers,
        tokenizer=tokenizer.digest,
        chat_template=tokenizer.chat_template_digest,
        special_tokens=tokenizer.special_tokens_digest,
        eos_ids=tokenizer.eos_ids,
    )


def longest_context(path: Path) -> int | None:
    """The longest context, in tokens, that the checkpoint in folder `path` states; None if it states none."""
    return _longest_context(_text_config(path))


def require_for_vllm(path: Path, device: str) -> None:
    """ModelError if vLLM, on this device, computes the model in folder `path` otherwise than the other frameworks."""
    if why := vllm.refusal(_text_config(path), device):
        raise ModelError(f"vLLM cannot prefill it: {why}", "use the engine transformers for this model")


def layout(profile: ModelProfile, dtype: str) -> Layout:
    """The KV layout of a profile with keys and values in `dtype`."""
    return layout_of(profile.layers, dtype)


def layout_of(layers: Iterable[LayerProfile], dtype: str) -> Layout:
    """The KV layout of these layers with keys and values in `dtype`."""
    return Layout(tuple(_in_dtype(layer.layout, dtype) for layer in layers), dtype)


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


def _in_dtype(layer: LayerLayout, dtype: str) -> LayerLayout:
    states = (replace(state, dtype=dtype) if state.dtype == MODEL_DTYPE else state for state in layer.states)
    return replace(layer, states=tuple(states))


def _rope_text(rope: Rope | None) -> str:
    return "none" if rope is None else " ".join(f"{x:.6g}" for x in (rope.scale, *rope.inv_freq))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:  # the hub's errors are OSErrors; a bad id is a ValueError
        return Path(snapshot_download(hub_id, allow_patterns=_FILES, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{hub_id}: not in the local cache and not downloaded: {first_line(error)}",
            "check the id and the network, or give a folder; on hosts of a fleet: disagg models pull",
        ) from error


def _load_config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path / 'config.json'}: transformers cannot read it: {first_line(error)}",
            "compare it with the model's original, or update transformers for a newer architecture",
        ) from error


def _text_config(path: Path) -> Any:
    """The configuration of the text model: of a multimodal checkpoint the part that reads text."""
    return _load_config(path).get_text_config(decoder=True)


def _refuse_unsupported(path: Path, config: Any) -> None:
    reasons = {
        "it is not a decoder alone": getattr(config, "is_encoder_decoder", False),
        "it has no attention layers of a known form": not hasattr(config, "num_attention_heads"),
        "its attention is bidirectional": getattr(config, "use_bidirectional_attention", None) in (True, "all"),
        (refusal := architecture_of(config).refusal(config)): refusal,
    }
    for reason, applies in reasons.items():
        if applies:
            raise _cannot_be_served(path, config, reason)


def _layers(path: Path, config: Any) -> tuple[LayerProfile, ...]:
    try:
        layers = architecture_of(config).layers(config)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise _cannot_be_served(path, config, f"its configuration is of an unknown form: {error}") from error
    if not any(layer.layout.kv_heads for layer in layers):
        raise _cannot_be_served(path, config, "no layer of it has attention, and its KV no tokens")
    return layers


def _cannot_be_served(path: Path, config: Any, reason: str) -> ModelError:
    return ModelError(f"{path}: model type {config.model_type!r} cannot be served: {reason}", "use another model")


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
