"""What `python -m disagg.verify` prints and `disagg verify` shows."""

from __future__ import annotations

from disagg.api.base import Contract
from disagg.api.status import PreflightFinding


class RunComparison(Contract, frozen=True):
    """Two runs of one prompt. equal_tokens: leading tokens that agree. first_divergence: index of the first token that
    differs, None if all agree. The rest compares logits along the same forced answer: max_logit_diff, mean_kl in nats,
    top1 as a share of 1."""

    equal_tokens: int
    first_divergence: int | None
    max_logit_diff: float
    mean_kl: float
    top1: float


class BackendFinding(PreflightFinding, frozen=True, kw_only=True):
    """A preflight finding of one of the two engines."""

    backend: str = ""


class VerifyReport(Contract, frozen=True, kw_only=True):
    """A hand-off compared with each engine alone.

    wrong_kv_changes_output: whether the KV of another prompt changed the answer, as it must; None for a prompt of one
    token, which needs no KV. distinct_tokens: in the answer. decode_computed_tokens: prompt tokens that the decode
    engine computed after the hand-off, 1 if the KV was used. ok: all runs agree as well as `dtype` allows, and the two
    controls hold.
    """

    architecture: str
    dtype: str
    prompt_tokens: int
    max_tokens: int
    handoff_vs_prefill: RunComparison
    handoff_vs_decode: RunComparison
    prefill_vs_decode: RunComparison
    wrong_kv_changes_output: bool | None
    distinct_tokens: int
    decode_computed_tokens: int
    kv_bytes: int
    preflight: tuple[BackendFinding, ...]
    ok: bool
