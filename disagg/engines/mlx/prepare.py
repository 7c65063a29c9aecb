"""Load a checkpoint for mlx-lm, patch it, and check that it computes what the checkpoint describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from disagg.api.status import PreflightFinding
from disagg.config import EngineOptions
from disagg.engines.base import EngineInfo
from disagg.engines.mlx.load import load
from disagg.engines.mlx.patches import Patch
from disagg.engines.mlx.profile import Measured, measure
from disagg.engines.model import checkpoint, preflight
from disagg.engines.model.checkpoint_files import form_of_weights
from disagg.engines.model.profile import ModelProfile
from disagg.engines.model.text import HFTokenizer


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
    path = checkpoint.resolve(source)
    tokenizer = HFTokenizer.load(path)
    reference = checkpoint.reference_profile(path, context, tokenizer)
    loaded = load(path, dtype=options.dtype, device=device)
    measured = measure(loaded.model)
    patched = [
        finding for patch in patches for finding in patch(loaded.model, loaded.config, reference, measured.layers)
    ]
    if patched:
        measured = measure(loaded.model)
    profile = _profile(reference, measured, _text_type(loaded.config), tokenizer)
    findings = _merged(preflight.compare(reference, profile), patched)
    preflight.require(findings)
    info = EngineInfo(
        backend=f"mlx/{'cpu' if device == mx.cpu else 'gpu'}",
        versions={name: version(name) for name in ("mlx", "mlx-lm", "transformers")},
        profile=profile,
        # The reference's layers, not the measured ones: if the context fits a window, "full" and "sliding" keep the
        # same rows, and both hosts must use the same name.
        layout=checkpoint.layout(reference, measured.dtype),
        fingerprint=checkpoint.fingerprint(reference),
        preflight=findings,
        memory_bytes=loaded.memory_bytes,
        eos_ids=tokenizer.eos_ids,
        weights=form_of_weights(loaded.config, options.dtype),
        mixture=loaded.mixture,
    )
    return Prepared(loaded.model, loaded.active_bytes, info, tokenizer)


def _text_type(config: Mapping[str, Any]) -> str:
    """The model type of the part that reads text."""
    return str((config.get("text_config") or {}).get("model_type") or config["model_type"])


def _profile(reference: ModelProfile, measured: Measured, architecture: str, tokenizer: HFTokenizer) -> ModelProfile:
    """Measured layers; tokenizer and end-of-sequence ids are those of the checkpoint, which this engine uses."""
    return ModelProfile(
        source="mlx-lm",
        architecture=architecture,
        vocab_size=measured.vocab_size,
        context=reference.context,
        layers=measured.layers,
        tokenizer=tokenizer.digest,
        chat_template=tokenizer.chat_template_digest,
        special_tokens=tokenizer.special_tokens_digest,
        eos_ids=tokenizer.eos_ids,
    )


def _merged(findings: Sequence[PreflightFinding], patched: Sequence[PreflightFinding]) -> tuple[PreflightFinding, ...]:
    """Both, without the "ok" of a component that agrees only because it was patched."""
    components = {finding.component for finding in patched}
    unpatched = [f for f in findings if not (f.status == "ok" and f.component in components)]
    return (*unpatched, *patched)
