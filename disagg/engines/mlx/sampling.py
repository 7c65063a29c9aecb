"""The next token from logits, per request, in transformers' order: penalties, bias and a constraint; temperature,
top-k, top-p, min-p; draw. And log-probabilities.

mlx-lm's own samplers filter before the temperature and share one global random state, so that requests in a batch
change each other's draws; here every draw depends on its request's seed and its number only.
`engines/transformers/sampling.py` does the same in torch, step for step.

A constraint acts in two places, between which its process finds the next mask, for all answers of a step at the same
time: `Adjustment` tells it the last token, `constrained` waits for the mask.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from disagg.api.sampling import Sampling
from disagg.engines.model import draw
from disagg.engines.model.bans import Bans
from disagg.engines.model.constraint import Constraint, fitted

Sampler = Callable[[Any], Any]  # log-probabilities [n, vocab], float32 -> token ids [n]


def greedy(logprobs: Any) -> Any:
    """The likeliest token. All greedy requests share this function, so that a greedy batch is one argmax."""
    return mx.argmax(logprobs, axis=-1)


def sampler(sampling: Sampling, answered: int = 0) -> Sampler:
    """A sampler for one request, of whose answer `answered` tokens are given. Stateful unless greedy: call it exactly
    once per token."""
    return greedy if sampling.greedy else _Draw(sampling, answered)


class _Draw:
    """Draws from the filtered distribution; see disagg.engines.model.draw."""

    def __init__(self, sampling: Sampling, answered: int) -> None:
        self._sampling = sampling
        self._seed = draw.new_seed() if sampling.seed is None else sampling.seed
        self._position = answered

    def __call__(self, logprobs: Any) -> Any:
        number = draw.uniform(self._seed, self._position)
        self._position += 1
        return choose(filtered(logprobs, self._sampling), number)


def filtered(logits: Any, sampling: Sampling) -> Any:
    """Logits or log-probabilities [n, vocab], float32, at the temperature; -inf for tokens that are filtered out."""
    logits = logits / sampling.temperature
    for keep in (_top_k, _top_p, _min_p):
        logits = keep(logits, sampling)
    return logits


def choose(logits: Any, number: float) -> Any:
    """The tokens [n] that a random number in [0, 1) draws from logits [n, vocab]."""
    sums = mx.cumsum(_weights(logits), axis=-1)
    total = sums[..., -1:]
    target = mx.minimum((total.astype(mx.float32) * number).astype(mx.int32), total - 1)
    return mx.argmax(sums > target, axis=-1)


def _weights(logits: Any) -> Any:
    """Probabilities as integers, int32; their sum is draw.SCALE but for rounding."""
    return mx.round(mx.softmax(logits, axis=-1, precise=True) * draw.SCALE).astype(mx.int32)


def _top_k(logits: Any, sampling: Sampling) -> Any:
    k = sampling.top_k
    if not 0 < k < logits.shape[-1]:
        return logits
    threshold = mx.min(mx.topk(logits, k, axis=-1), axis=-1, keepdims=True)
    return mx.where(logits < threshold, -mx.inf, logits)


def _top_p(logits: Any, sampling: Sampling) -> Any:
    """Keep the fewest likeliest tokens whose probabilities reach top_p, and those as likely as the last of them."""
    if sampling.top_p >= 1.0:
        return logits
    ordered = -mx.sort(-logits, axis=-1)
    weights = _weights(ordered)
    sums = mx.cumsum(weights, axis=-1)
    limit = mx.maximum((sums[..., -1:].astype(mx.float32) * sampling.top_p).astype(mx.int32), 1)
    threshold = mx.min(mx.where(sums - weights < limit, ordered, mx.inf), axis=-1, keepdims=True)
    return mx.where(logits < threshold, -mx.inf, logits)


def _min_p(logits: Any, sampling: Sampling) -> Any:
    """Keep tokens at least min_p times as likely as the likeliest."""
    if sampling.min_p <= 0.0:
        return logits
    threshold = mx.max(logits, axis=-1, keepdims=True) + math.log(sampling.min_p)
    return mx.where(logits < threshold, -mx.inf, logits)


def read_row(array: Any) -> Any:
    """An evaluated row [vocab] or [1, vocab] of log-probabilities or logits, float32, as a numpy view, without an mlx
    operation.

    `array.item()` takes 120 us and, on a GPU, waits for the step that is already in flight; a view of the unified
    memory takes 0.6 us.
    """
    return np.frombuffer(array, dtype=np.float32)


def log_probability(logits: Any, token: int) -> float:
    """The log-probability of one token by a `read_row` of logits: as by `log_softmax`, to the last bit. NaN if any
    logit is NaN."""
    highest = logits.max()
    weights = logits - highest
    np.exp(weights, out=weights)
    return float((logits[token] - highest) - np.log(weights.sum()))


def log_softmax(logits: Any) -> Any:
    """The log-probabilities of all tokens by a `read_row` of logits."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def top_logprobs(row: Any, count: int) -> tuple[tuple[int, float], ...]:
    """(id, log-probability) of the `count` likeliest tokens of a `read_row`, likeliest first."""
    count = min(count, len(row))
    ids = np.argpartition(row, -count)[-count:]
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return tuple((int(i), float(row[i])) for i in ids)


def adjustment(
    sampling: Sampling, answered: int = 0, constraint: Constraint | None = None, bans: Bans | None = None
) -> Adjustment | None:
    """A new adjustment for one request, of whose answer `answered` tokens are given; None if nothing is adjusted."""
    counted = sampling.presence_penalty or sampling.frequency_penalty
    if sampling.repetition_penalty != 1.0 or counted or sampling.logit_bias or constraint or bans:
        return Adjustment(sampling, answered, constraint, bans)
    return None


class Adjustment:
    """A logits processor: the request's penalties, bias and bans, in this order, and the tokens for its constraint,
    with which `constrained` applies the bans. The repetition penalty is on prompt and answer, presence and frequency
    penalty on the answer.

    raw: the model's unprocessed logits [1, vocab], float32, of the steps not reported yet, oldest first. Reported
    log-probabilities are computed from these.
    """

    def __init__(self, sampling: Sampling, answered: int, constraint: Constraint | None, bans: Bans | None) -> None:
        self._sampling = sampling
        self._answered = answered
        self._constraint = constraint
        self._bans = bans
        self._started = False
        self._seen: Any = None  # [vocab], of prompt and answer
        self._counts: Any = None  # [vocab], in the answer
        self._bias: Any = None  # [vocab]
        self.raw: deque[Any] = deque()

    def __call__(self, tokens: Any, logits: Any) -> Any:
        """tokens: all of the sequence so far. logits: [1, vocab], float32. Called once per step."""
        self.raw.append(logits)
        if not self._started:
            self._start(tokens, logits.shape[-1])
        else:
            self._add(tokens[-1:])
        logits = self._biased(self._counted(self._repeated(logits)))
        if self._constraint is None and self._bans is not None:
            return without_banned(logits, self._bans)
        if self._constraint is not None and self._constraint.pending:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # computed while the mask is found
        return logits

    def _start(self, tokens: Any, vocab: int) -> None:
        self._started = True
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            self._seen = mx.zeros((vocab,), dtype=mx.bool_)
            self._seen[tokens] = True
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = mx.zeros((vocab,), dtype=mx.float32)
            if self._answered:
                self._counts = self._counts.at[tokens[-self._answered :]].add(1.0)
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._bias = mx.zeros((vocab,), dtype=mx.float32).at[mx.array(ids)].add(mx.array(values))

    def _add(self, token: Any) -> None:
        """Count one more token of the answer. A constraint and some bans need to know which it is, and wait for its
        step."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts = self._counts.at[token].add(1.0)
        reads = self._bans is not None and self._bans.reads
        known = int(token.item()) if reads or self._constraint is not None else 0
        if self._bans is not None:
            self._bans.add(known)
        if self._constraint is not None:
            self._constraint.accept(known)

    def _repeated(self, logits: Any) -> Any:
        penalty = self._sampling.repetition_penalty
        if self._seen is None:
            return logits
        return mx.where(self._seen, mx.where(logits > 0, logits / penalty, logits * penalty), logits)

    def _counted(self, logits: Any) -> Any:
        if self._counts is None:
            return logits
        logits = logits - self._counts * self._sampling.frequency_penalty
        return logits - (self._counts > 0).astype(mx.float32) * self._sampling.presence_penalty

    def _biased(self, logits: Any) -> Any:
        return logits if self._bias is None else logits + self._bias


def without_banned(logits: Any, bans: Bans) -> Any:
    """Logits [1, vocab] without the tokens that may not come next."""
    banned = bans.now(logits.shape[-1])
    return logits.at[..., mx.array(banned)].add(-mx.inf) if banned else logits


def constrained(
    sampler: Callable[[Any], Any], constraint: Constraint, bans: Bans | None = None
) -> Callable[[Any], Any]:
    """A sampler that chooses only what the constraint allows, and of that nothing that is banned."""

    def choose(logprobs: Any) -> Any:
        allowed = constraint.allowed()
        if allowed is not None:
            allowed = allowed if bans is None else bans.within(allowed)
            logprobs = mx.where(mx.array(fitted(allowed, logprobs.shape[-1])), logprobs, -mx.inf)
        elif bans is not None:
            logprobs = without_banned(logprobs, bans)
        return sampler(logprobs)

    return choose
