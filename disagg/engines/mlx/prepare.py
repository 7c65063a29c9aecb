"""From a checkpoint to a model that may be served by mlx-lm: load, measure, mend, compare, refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from disagg.config import EngineOptions
from disagg.engines.base import EngineInfo
from disagg.engines.mlx.load import load
from disagg.engines.mlx.patches import Mend
from disagg.engines.mlx.profile import Measured, measure
from disagg.engines.model import checkpoint, preflight
from disagg.engines.model.profile import Finding, ModelProfile
from disagg.engines.model.text import HFTokenizer


@dataclass(frozen=True, slots=True)
class Prepared:
    """A loaded model that passed the preflight. active_bytes: see LoadedModel."""

    model: Any
    active_bytes: int
    info: EngineInfo
    tokenizer: HFTokenizer


def prepare(
    source: str | Path, options: EngineOptions, *, context: int, device: Any, mends: Sequence[Mend]
) -> Prepared:
    """Load `source` and hold it against its own checkpoint. ModelError, or PreflightRefused with every reason."""
    path = checkpoint.resolve(source)
    tokenizer = HFTokenizer.load(path)
    reference = checkpoint.reference_profile(path, context, tokenizer)
    loaded = load(path, dtype=options.dtype, device=device)
    measured = measure(loaded.model)
    mended = [finding for mend in mends for finding in mend(loaded.model, loaded.config, reference, measured.layers)]
    if mended:
        measured = measure(loaded.model)
    profile = _profile(reference, measured, str(loaded.config["model_type"]), tokenizer)
    findings = _merged(preflight.compare(reference, profile), mended)
    preflight.require(findings)
    info = EngineInfo(
        backend=f"mlx/{'cpu' if device == mx.cpu else 'gpu'}",
        versions={name: version(name) for name in ("mlx", "mlx-lm", "transformers")},
        profile=profile,
        # The reference's layers, not the measured ones: where the context fits a window, "full" and "sliding" keep the
        # same rows, and both hosts must name them alike.
        layout=checkpoint.layout(reference, measured.dtype),
        fingerprint=checkpoint.fingerprint(reference),
        preflight=findings,
        memory_bytes=loaded.memory_bytes,
        eos_ids=tokenizer.eos_ids,
    )
    return Prepared(loaded.model, loaded.active_bytes, info, tokenizer)


def _profile(reference: ModelProfile, measured: Measured, architecture: str, tokenizer: HFTokenizer) -> ModelProfile:
    """The tokenizer and the ids that end an answer are those this engine uses, whatever mlx-lm would choose."""
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


def _merged(findings: Sequence[Finding], mended: Sequence[Finding]) -> tuple[Finding, ...]:
    """A mended component that now agrees is reported as mended, not as ok."""
    components = {finding.component for finding in mended}
    kept = [f for f in findings if not (f.status == "ok" and f.component in components)]
    return (*kept, *mended)
