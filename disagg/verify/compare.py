"""Two runs of one prompt compared, by the logits of engines or the likeliest tokens that servers state, and what they
may differ by. Pure.

With the same weights on both ends, a hand-off may differ from either engine alone by the rounding of one engine. With
weights of different forms (FP8 here, 8 bits there) it is the answer of neither: its prompt was read with one end's
weights, its answer is written with the other's. It then may differ from each by what the two differ by without any
hand-off, and that is bounded, too: weights that differ more are hardly those of one model.

A server states the likeliest tokens at each place, and not the distribution over the whole vocabulary. Two answers of
servers are compared until their first difference: from there on they continue different texts. Those of splits are
compared so, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy

from disagg.api.events import TokenLogprob
from disagg.api.layout import SplitLayout
from disagg.api.verify import RunComparison, SplitComparison, VerifyBounds
from disagg.config import MAX_TOLERANCE, MIN_TOLERANCE, DType, Host, Model

AUDIT_SPARE = 4.0
"""An audit's bound that follows from a pair's own controls, over what its KV differed by."""
MAX_LOGIT_DIFF = 1e-2  # float32; 3e-6 to 2e-3 were measured over thirteen architectures (gemma3 the largest)
# In half precision the frameworks round differently; the bounds allow for the rounding noise of a single engine.
NOISE = {
    "float32": VerifyBounds(max_kl=1e-5, min_top1=1.0, max_logit_diff=MAX_LOGIT_DIFF),
    "float16": VerifyBounds(max_kl=5e-3, min_top1=0.95),
    "bfloat16": VerifyBounds(max_kl=5e-2, min_top1=0.85),
}
ALONE = {**NOISE, "float32": VerifyBounds(max_kl=1e-5, min_top1=1.0, max_logit_diff=1e-1)}
"""The bounds of two engines with the same weights, each alone. Their rounding adds up to 0.02 in some models."""
OTHER_WEIGHTS = VerifyBounds(max_kl=0.5, min_top1=0.7)
"""The bounds of two engines whose weights have different forms, each alone."""
KL_FACTOR = 1.25
"""The hand-off's KL over that of the two engines alone: the two are means over the same few positions."""
DIFF_FACTOR = 3.0
"""The hand-off's largest difference of a logit over that of the controls: a largest one varies more than a mean."""
Z = 1.96  # 95 %

Logits = Any  # numpy.ndarray [positions, vocab]
LEAST_REST: Final = 1e-5
"""The least probability that the compared tokens leave to all others: less is rounding."""
_BY_NOISE: Final[Sequence[DType]] = ("bfloat16", "float16", "float32")
"""The largest rounding first. KV that is quantised on its way counts as the first."""
Answer = Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One engine's run: its greedy tokens, and its logits along the forced answer, [positions, vocab]."""

    tokens: Sequence[int]
    logits: Logits


@dataclass(frozen=True, slots=True)
class Runs:
    """All runs of one prompt: with the hand-off, and twice with either engine alone."""

    handoff: EngineRun
    prefill: EngineRun
    decode: EngineRun
    prefill_again: EngineRun
    decode_again: EngineRun


class Comparisons(NamedTuple):
    """The comparisons of a VerifyReport, under the names that it has for them."""

    handoff_vs_prefill: RunComparison
    handoff_vs_decode: RunComparison
    prefill_vs_decode: RunComparison
    prefill_again: RunComparison
    decode_again: RunComparison

    @classmethod
    def of(cls, runs: Runs) -> Comparisons:
        return cls(
            handoff_vs_prefill=compare(runs.handoff, runs.prefill),
            handoff_vs_decode=compare(runs.handoff, runs.decode),
            prefill_vs_decode=compare(runs.prefill, runs.decode),
            prefill_again=compare(runs.prefill_again, runs.prefill),
            decode_again=compare(runs.decode_again, runs.decode),
        )

    def within(self, limits: VerifyBounds, alone: VerifyBounds) -> bool:
        """Whether the hand-off is within `limits` of either engine, and the two of each other within `alone`."""
        handoffs = self.handoff_vs_prefill, self.handoff_vs_decode
        return within(self.prefill_vs_decode, alone) and all(within(one, limits) for one in handoffs)


def compare(run: EngineRun, other: EngineRun) -> RunComparison:
    """How `run` differs from `other`; KL is that of `run` from `other`."""
    pairs = zip(run.tokens, other.tokens, strict=True)
    divergence = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    difference, divergences, agreeing = 0.0, [], 0
    for here, there in zip(run.logits, other.logits, strict=True):  # by position: a vocabulary may have 200,000 tokens
        ours, theirs = _log_softmax(here), _log_softmax(there)
        difference = max(difference, float(numpy.abs(ours - theirs).max()))
        divergences.append(float((numpy.exp(theirs) * (theirs - ours)).sum()))
        agreeing += int(ours.argmax() == theirs.argmax())
    equal = len(run.tokens) if divergence is None else divergence
    return _comparison(equal, divergence, difference, divergences, agreeing)


def _comparison(
    equal: int, first: int | None, difference: float, divergences: Sequence[float], agreeing: int
) -> RunComparison:
    """divergences: the KL at each position. agreeing: the positions whose likeliest token is the same."""
    positions = len(divergences)
    low, high = interval(agreeing, positions)
    return RunComparison(
        equal_tokens=equal,
        first_divergence=first,
        max_logit_diff=difference,
        mean_kl=max(0.0, math.fsum(divergences) / positions),
        top1=agreeing / positions,
        top1_low=low,
        top1_high=high,
    )


def interval(agreeing: int, positions: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score: also right for shares near 1 of few positions."""
    share, weight = agreeing / positions, Z * Z / positions
    centre = (share + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(share * (1 - share) / positions + weight / (4 * positions))
    return max(0.0, centre - half), min(1.0, centre + half)


def bounds(
    dtype: DType, *, same_weights: bool, alone: RunComparison, again: Sequence[RunComparison] = ()
) -> VerifyBounds:
    """What the hand-off may differ by from either engine alone. The controls are `alone`, the two engines compared,
    each alone, and `again`, each compared with itself."""
    noise = NOISE[dtype]
    if same_weights:
        controls = (alone, *again)
        exact = noise.max_logit_diff
        return VerifyBounds(
            max_kl=max(noise.max_kl, KL_FACTOR * max(one.mean_kl for one in controls)),
            min_top1=noise.min_top1,
            max_logit_diff=None
            if exact is None
            else max(exact, DIFF_FACTOR * max(one.max_logit_diff for one in controls)),
        )
    chance = math.sqrt(2) * (alone.top1 - alone.top1_low)  # by which the shares of two samples may differ
    return VerifyBounds(
        max_kl=KL_FACTOR * alone.mean_kl + noise.max_kl, min_top1=max(0.0, noise.min_top1 * (alone.top1 - chance))
    )


def bounds_alone(dtype: DType, *, same_weights: bool) -> VerifyBounds:
    """What the two engines, each alone, may differ by."""
    return ALONE[dtype] if same_weights else OTHER_WEIGHTS


def within(comparison: RunComparison, limits: VerifyBounds) -> bool:
    """Whether two runs differ by no more than this."""
    exact = limits.max_logit_diff is None or (
        comparison.first_divergence is None and comparison.max_logit_diff <= limits.max_logit_diff
    )
    return exact and comparison.mean_kl <= limits.max_kl and comparison.top1 >= limits.min_top1


def summary(prefill: str, decode: str, positions: int, found: Comparisons) -> str:
    """What the figures mean for whoever reads the answers. prefill, decode: the engines."""
    pair = found.handoff_vs_decode
    return (
        f"The pair agrees with {decode} alone in {pair.top1:.1%} of {positions} next tokens (95 % interval "
        f"{pair.top1_low:.1%} to {pair.top1_high:.1%}). Two runs of {decode} alone agree in "
        f"{found.decode_again.top1:.1%}, {prefill} alone and {decode} alone in {found.prefill_vs_decode.top1:.1%}."
    )


def _log_softmax(logits: Logits) -> Logits:
    row = numpy.asarray(logits, numpy.float64)
    shifted = row - row.max()
    return shifted - math.log(float(numpy.exp(shifted).sum()))


def audit_tolerance(deviation: float) -> float:
    """The kv_audit_tolerance of hosts.toml with which a pair's audits refute what differs by AUDIT_SPARE times as much
    as the KV that its controls have shown to be right. deviation: of that KV, as a share of the bound without it."""
    return min(MAX_TOLERANCE, max(MIN_TOLERANCE, math.ceil(10 * AUDIT_SPARE * deviation) / 10))


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
    return _comparison(equal, first, difference, divergences, equal)


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


QUARTERS: Final = (1, 2, 3)
Answers = Sequence[Answer]


def split_layers(split: SplitLayout) -> Sequence[int]:
    """The `quarters` of a model, of which at least one layer keeps something."""
    least = split.places[0] + 1
    return sorted({max(least, layers) for layers in quarters(split.layers)} - {split.layers})


def quarters(layers: int) -> Sequence[int]:
    """A quarter, half and three quarters of so many layers, as far as these are different, and neither none nor all."""
    return sorted({layers * quarter // 4 for quarter in QUARTERS} - {0, layers})


def compare_split(
    layers: int, by_split: Answers, alone: tuple[Answers, Answers], computed_tokens: int, *, limit: VerifyBounds
) -> SplitComparison:
    """Answers to one prompt after the other, by the split, and by the prefill and the decode end alone; empty if an end
    does not answer alone. limit: what they may differ by."""
    prefill, decode = (compare_answers(by_split, answers) if answers else None for answers in alone)
    why = "; ".join(_split_differences(prefill, decode, computed_tokens, limit))
    return SplitComparison(
        layers=layers,
        vs_prefill=prefill,
        vs_decode=decode,
        computed_tokens=computed_tokens,
        ok=not why,
        why=why,
    )


def _split_differences(
    prefill: RunComparison | None, decode: RunComparison | None, computed_tokens: int, limit: VerifyBounds
) -> Iterator[str]:
    for end, found in (("prefill", prefill), ("decode", decode)):
        if found is not None and not agrees(found, limit):
            yield f"it differs from {end} alone"
    if computed_tokens != 1:
        yield f"the decode end computed {computed_tokens} tokens of a prompt itself"
