"""Load a checkpoint for mlx-lm, patch it, and check that it computes what the checkpoint describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from disagg.config import EngineOptions
from disagg.engines.mlx.load import load
from disagg.engines.mlx.profile import measure, rope_modules
from disagg.engines.model.architectures import LoadedByMLX, Patch
from disagg.engines.model.reference import EngineInfo, Reference
from disagg.engines.model.text import HFTokenizer
from disagg.planning.checkpoint import weights_form


@dataclass(frozen=True, slots=True)
class Prepared:
    """A loaded model that passed the preflight. active_bytes: see LoadedModel."""

    model: Any
    active_bytes: int
    info: EngineInfo
    tokenizer: HFTokenizer


def prepare(
    source: str | Path, options: EngineOptions, *, context: int, device: Any, patches: Sequence[Patch]
) -> Prepared:
    """Load `source`, patch it and compare it with its checkpoint. Raises ModelError if it cannot be loaded, and
    PreflightRefused, with every reason, if mlx-lm computes something else."""
    reference = Reference.open(source, context)
    loaded = load(reference.path, dtype=options.dtype, device=device)
    measured = measure(loaded.model)
    ropes = tuple(rope_modules(loaded.model))
    whole = LoadedByMLX(loaded.model, loaded.config, reference.profile, measured.layers, ropes)
    patched = [finding for patch in patches for finding in patch(whole)]
    if patched:
        measured = measure(loaded.model)
    # Tokenizer and end-of-sequence ids are those of the checkpoint, which this engine uses.
    actual = replace(
        reference.profile,
        source="mlx-lm",
        architecture=_text_type(loaded.config),
        vocab_size=measured.vocab_size,
        layers=measured.layers,
    )
    info = reference.info(
        actual,
        reference.verdict(actual, patched),
        measured.dtype,
        backend=f"mlx/{'cpu' if device == mx.cpu else 'gpu'}",
        versions={name: version(name) for name in ("mlx", "mlx-lm", "transformers")},
        memory_bytes=loaded.memory_bytes,
        weights=weights_form(loaded.config, options.dtype),
        mixture=loaded.mixture,
    )
    return Prepared(loaded.model, loaded.active_bytes, info, reference.tokenizer)


def _text_type(config: Mapping[str, Any]) -> str:
    """The model type of the part that reads text."""
    return str((config.get("text_config") or {}).get("model_type") or config["model_type"])
