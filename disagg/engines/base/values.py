"""What both kinds of engine state about themselves and their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.api.events import FinishReason
from disagg.api.layout import Layout
from disagg.api.status import Evidence, PreflightFinding
from disagg.engines.model.profile import ModelProfile
from disagg.kv.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. top: (id, logprob) of the likeliest tokens, if requested.
    finish: set on the last token of a request: "stop" for an end-of-sequence token, "length" at max_tokens."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A loaded engine: backend, package versions, the model's profile, layout and fingerprint, and its preflight.
    evidence: its likeliest tokens after a fixed text, from its warm-up. weights: their form, in words; empty if it is
    not known. mixture: it has experts, of which a token uses some. audits: it can audit received KV."""

    backend: str  # e.g. "transformers/cuda", "mlx/cpu"
    versions: dict[str, str]  # package -> version
    profile: ModelProfile
    layout: Layout
    fingerprint: Fingerprint
    preflight: tuple[PreflightFinding, ...] = ()
    memory_bytes: int = 0  # weights, as loaded
    eos_ids: frozenset[int] = field(default_factory=frozenset)
    evidence: Evidence | None = None
    kv_bytes: int | None = None  # KV of prompts that it has memory for, if it knows
    weights: str = ""
    mixture: bool = False
    audits: bool = False
