"""What `disagg verify` shows: of a fleet's hosts a HostsReport, of two engines here the VerifyReport that
`python -m disagg.verify` prints. Its prefill engine is a process of its own, which writes one PrefillReady, then a
PrefillReply for each PrefillCall, each as one line of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from disagg.api.base import Contract
from disagg.api.events import TokenLogprob
from disagg.api.requests import KVAddress
from disagg.api.status import PreflightFinding


class RunComparison(Contract, frozen=True):
    """Two runs of one prompt. equal_tokens: leading tokens that agree. first_divergence: index of the first token that
    differs, None if all agree. The rest compares next-token distributions along the same forced answer:
    max_logit_diff, of logits whose exponentials sum to 1; mean_kl in nats; top1, the share of positions with the same
    likeliest token, and its 95 % interval."""

    equal_tokens: int
    first_divergence: int | None
    max_logit_diff: float
    mean_kl: float
    top1: float
    top1_low: float
    top1_high: float


class SplitComparison(Contract, frozen=True, kw_only=True):
    """A prompt that both ends computed: the prefill end the model's first `layers` layers, the decode end the others.
    Its answers compared with those of each end alone, by the likeliest tokens that they state, until the first
    difference. computed_tokens: the most that the decode end computed of a prompt through all layers, 1 if the split
    was used. ok: both are within the bounds of the hand-off. why: if not, the reason; if a request failed there are
    no comparisons."""

    layers: int
    vs_prefill: RunComparison | None = None
    vs_decode: RunComparison | None = None
    computed_tokens: int = 0
    ok: bool = False
    why: str = ""


class VerifyBounds(Contract, frozen=True, kw_only=True):
    """What two runs may differ by. max_logit_diff: None if tokens need not be equal."""

    max_kl: float
    min_top1: float
    max_logit_diff: float | None = None


class BackendFinding(PreflightFinding, frozen=True, kw_only=True):
    """A preflight finding of one of the two engines."""

    backend: str = ""


class VerifyReport(Contract, frozen=True, kw_only=True):
    """A hand-off compared with each engine alone.

    versions, prefill_versions: of the packages of the decode engine, and of the prefill engine. prefill_weights,
    decode_weights: the form of each engine's weights. same_weights: whether both compute with the same numbers.
    prefill_again, decode_again: each engine alone, compared with itself when it computes the prompt in smaller pieces.
    bounds: of the hand-off compared with either engine alone; bounds_alone: of the two engines alone.
    wrong_kv_changes_output: whether the KV of another prompt changed the answer, as it must; None for a prompt of one
    token, which needs no KV. distinct_tokens: in the answer. decode_computed_tokens: prompt tokens that the decode
    engine computed after the hand-off, 1 if the KV was used. deviation: what the KV differed by in an audit, as a share
    of the bound for these dtypes and weights; may be more than 1 here; None if this model has no audit. splits: at a
    quarter, half and three quarters of the layers. split_refusal: why there are none; empty if there are. ok: all runs
    agree within their bounds, and the two controls hold. summary: the figures in a sentence.
    """

    architecture: str
    dtype: str
    versions: Mapping[str, str] = {}
    prefill_versions: Mapping[str, str] = {}
    prefill: str
    prefill_weights: str
    decode: str
    decode_weights: str
    same_weights: bool
    prompt_tokens: int
    max_tokens: int
    handoff_vs_prefill: RunComparison
    handoff_vs_decode: RunComparison
    prefill_vs_decode: RunComparison
    prefill_again: RunComparison
    decode_again: RunComparison
    bounds: VerifyBounds
    bounds_alone: VerifyBounds
    wrong_kv_changes_output: bool | None
    distinct_tokens: int
    decode_computed_tokens: int
    kv_bytes: int
    deviation: float | None = None
    preflight: tuple[BackendFinding, ...]
    summary: str
    ok: bool
    splits: tuple[SplitComparison, ...] = ()
    split_refusal: str = ""


class PairReport(Contract, frozen=True, kw_only=True):
    """Answers that a prefill and a decode host gave together, compared with those that each gave alone.

    Two answers are compared until their first difference. max_logit_diff and mean_kl of a comparison are those of the
    likeliest tokens that both hosts stated. same_weights: whether both hosts load the same source, unconverted.
    kv_wire, kv_bytes, decode_computed_tokens: of the hand-offs, the latter the most of any, 1 if the KV was used.
    deviation: the most that their KV differed by in an audit, as a share of its bound; None if none was audited.
    splits, split_refusal: as of VerifyReport. ok: all comparisons are within their bounds, and every prompt was handed
    over. why: if not, the reason; if a request failed there are no comparisons.
    """

    prefill: str
    decode: str
    same_weights: bool = False
    handoff_vs_prefill: RunComparison | None = None
    handoff_vs_decode: RunComparison | None = None
    prefill_vs_decode: RunComparison | None = None
    bounds: VerifyBounds | None = None
    bounds_alone: VerifyBounds | None = None
    kv_wire: str = ""
    kv_bytes: int = 0
    decode_computed_tokens: int = 0
    deviation: float | None = None
    splits: tuple[SplitComparison, ...] = ()
    split_refusal: str = ""
    ok: bool = False
    why: str = ""


class HostsReport(Contract, frozen=True, kw_only=True):
    """A model on the hosts of a fleet: every prefill host with every decode host. prompt_tokens: of the longest of
    `prompts` prompts. max_tokens: of each answer. distinct_tokens: in all answers of hand-offs."""

    model: str
    prompts: int
    prompt_tokens: int
    max_tokens: int
    distinct_tokens: int
    pairs: tuple[PairReport, ...]
    ok: bool


class PrefillReady(Contract, frozen=True, kw_only=True):
    """The prefill engine is loaded. backend: e.g. "vllm/cuda". versions: of its packages. split_refusal: why it
    computes no part of the layers; empty if it does. error: why it is not loaded."""

    backend: str = ""
    context: int = 0
    versions: Mapping[str, str] = {}
    preflight: tuple[PreflightFinding, ...] = ()
    split_refusal: str = ""
    error: dict[str, str] | None = None


class PrefillCall(Contract, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something to compute from these tokens. `answer`: the first `count` tokens of the greedy answer; `logits`: after
    each of the last `count` tokens, written to `file` as float32 (numpy's format); `send`: the KV of all but the last
    token, sent to `to` with this ticket. chunk_tokens: the prompt in pieces of so many tokens. layers: the KV of the
    model's first so many layers, in chunks with their hidden states; None: of all, not in chunks."""

    call: Literal["answer", "logits", "send"]
    tokens: tuple[int, ...]
    count: Annotated[int, Meta(ge=0)] = 0
    chunk_tokens: Annotated[int, Meta(ge=1)] | None = None
    file: str = ""
    to: KVAddress | None = None
    ticket: str = ""
    layers: Annotated[int, Meta(ge=1)] | None = None


class PrefillReply(Contract, frozen=True, kw_only=True):
    """The end of a call. tokens: of an answer, each with the likeliest in its place."""

    tokens: tuple[TokenLogprob, ...] = ()
    error: dict[str, str] | None = None
