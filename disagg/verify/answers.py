"""Answers that servers gave to the same prompts, compared. Pure.

A server states the likeliest tokens at each place, and not the distribution over the whole vocabulary. Two answers are
compared until their first difference: from there on they continue different texts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from disagg.api.events import TokenLogprob
from disagg.api.verify import RunComparison, VerifyBounds
from disagg.config import DType, Host, Model
from disagg.verify.compare import bounds, bounds_alone, interval

LEAST_REST: Final = 1e-5
"""Of the probability that the compared tokens leave to all others: less is rounding."""

_BY_NOISE: Final[Sequence[DType]] = ("bfloat16", "float16", "float32")
"""The largest rounding first. KV that is quantised on its way counts as the first."""

Answer = Sequence[TokenLogprob]


def compare_answers(ours: Sequence[Answer], theirs: Sequence[Answer]) -> RunComparison:
    """The answers of two ways to the same prompts, of at least one token each."""
    equal: int = 0
    first: int | None = None
    difference: float = 0.0
    divergences: list[float] = []
    for here, there in zip(ours, theirs, strict=True):
        for place, (one, other) in enumerate(zip(here, there, strict=True)):
            shared = _shared(one, other)
            difference = max([difference, *(abs(a - b) for a, b in shared.values())])
            divergences.append(_divergence(shared))
            if one.id != other.id:
                first = place if first is None else min(first, place)
                break
            equal += 1
    low, high = interval(equal, len(divergences))
    return RunComparison(
        equal_tokens=equal,
        first_divergence=first,
        max_logit_diff=difference,
        mean_kl=math.fsum(divergences) / len(divergences),
        top1=equal / len(divergences),
        top1_low=low,
        top1_high=high,
    )


def _shared(one: TokenLogprob, other: TokenLogprob) -> Mapping[int, tuple[float, float]]:
    """The log-probabilities of the tokens that both places state."""
    ours, theirs = ({token.id: token.logprob, **dict(token.top)} for token in (one, other))
    return {id: (ours[id], theirs[id]) for id in ours.keys() & theirs.keys()}


def _divergence(shared: Mapping[int, tuple[float, float]]) -> float:
    """KL in nats of these tokens and of all others taken as one: at most that of the whole vocabulary."""
    ours, theirs = ([math.exp(pair[side]) for pair in shared.values()] for side in (0, 1))
    pairs = [*zip(ours, theirs, strict=True), tuple(max(LEAST_REST, 1 - math.fsum(side)) for side in (ours, theirs))]
    return max(0.0, math.fsum(there * math.log(there / here) for here, there in pairs if there > 0 and here > 0))


def same_weights(model: Model, prefill: Host, decode: Host) -> bool:
    """Whether both hosts load the same source and convert nothing. What a `vllm serve` has loaded is not known."""
    known = prefill.engine.kind.loads and not prefill.engine.quantization
    return known and model.sources.get(prefill.engine.name) == model.sources.get(decode.engine.name)


def limits(
    prefill: Host, decode: Host, *, same: bool, as_is: bool, alone: RunComparison
) -> tuple[VerifyBounds, VerifyBounds]:
    """What the hand-off may differ by from either host alone, and these from each other. as_is: the KV was not
    quantised on its way. alone: the two hosts, each alone, compared."""
    dtypes = {prefill.engine.dtype, decode.engine.dtype}
    dtype = next(one for one in _BY_NOISE if one in dtypes)
    of_kv: DType = dtype if as_is else "bfloat16"
    return bounds(of_kv, same_weights=same, alone=alone), bounds_alone(dtype, same_weights=same)


def agrees(found: RunComparison, limit: VerifyBounds) -> bool:
    """Whether two ways differ by no more than this. Few places are compared if answers differ early: where tokens may
    differ at all, the upper end of the share's interval counts."""
    if limit.max_logit_diff is not None:
        exact = found.first_divergence is None and found.max_logit_diff <= limit.max_logit_diff
        return exact and found.mean_kl <= limit.max_kl
    return found.mean_kl <= limit.max_kl and found.top1_high >= limit.min_top1
