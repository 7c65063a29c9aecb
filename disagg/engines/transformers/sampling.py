"""The next token from logits, per request, in transformers' order: penalties, bias and a constraint; temperature,
top-k, top-p, min-p; draw.

`engines/mlx/sampling.py` does the same in mlx, step for step, so that both draw the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from disagg.api.sampling import Sampling
from disagg.engines.base import Token
from disagg.engines.model import draw
from disagg.engines.model.bans import Bans
from disagg.engines.model.constraint import Constraint, fitted


class Sampler:
    """Chooses the tokens of one request. tokens: the prompt and the answer's beginning. answered: how many of
    them belong to the answer."""

    def __init__(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        answered: int = 0,
        constraint: Constraint | None = None,
        bans: Bans | None = None,
    ) -> None:
        self._sampling = sampling
        self._seed = draw.new_seed() if sampling.seed is None else sampling.seed
        self._position = answered
        self._adjust = Adjustment(sampling, tokens, answered, constraint, bans)

    def next(self, logits: torch.Tensor) -> Token:
        """logits: [vocab], any device and dtype. Reported log-probabilities are the model's, before any processor."""
        with torch.inference_mode():
            return self._choose(logits.to("cpu", torch.float32))

    def _choose(self, raw: torch.Tensor) -> Token:
        scores = self._adjust(raw)
        if self._sampling.greedy:
            token = int(scores.argmax())
        else:
            token = choose(filtered(scores, self._sampling), draw.uniform(self._seed, self._position))
        self._position += 1
        self._adjust.add(token)
        return self._report(token, raw.log_softmax(-1))

    def _report(self, token: int, logprobs: torch.Tensor) -> Token:
        top = logprobs.topk(min(self._sampling.logprobs or 0, logprobs.shape[0]))
        pairs = tuple(zip((int(i) for i in top.indices), (float(p) for p in top.values), strict=True))
        return Token(token, float(logprobs[token]), pairs)


def filtered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits [vocab] at the temperature, -inf for tokens that are filtered out."""
    logits = logits / sampling.temperature
    for keep in (_top_k, _top_p, _min_p):
        logits = keep(logits, sampling)
    return logits


def choose(logits: torch.Tensor, number: float) -> int:
    """The token that a random number in [0, 1) draws from logits [vocab]."""
    sums = _weights(logits).cumsum(-1)
    total = sums[-1]
    target = torch.minimum((total.float() * number).long(), total - 1)
    return int(torch.searchsorted(sums, target, right=True))


def _weights(logits: torch.Tensor) -> torch.Tensor:
    """Probabilities as integers; their sum is draw.SCALE but for rounding."""
    return (logits.softmax(-1) * draw.SCALE).round().long()


def _top_k(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    if not 0 < sampling.top_k < logits.shape[-1]:
        return logits
    threshold = logits.topk(sampling.top_k).values[-1]
    return logits.masked_fill(logits < threshold, -math.inf)


def _top_p(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Keep the fewest likeliest tokens whose probabilities reach top_p, and those as likely as the last of them."""
    if sampling.top_p >= 1.0:
        return logits
    ordered = logits.sort(descending=True).values
    weights = _weights(ordered)
    sums = weights.cumsum(-1)
    limit = (sums[-1].float() * sampling.top_p).long().clamp(min=1)
    threshold = ordered[sums - weights < limit].min()
    return logits.masked_fill(logits < threshold, -math.inf)


def _min_p(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Keep tokens at least min_p times as likely as the likeliest."""
    if sampling.min_p <= 0.0:
        return logits
    return logits.masked_fill(logits < logits.max() + math.log(sampling.min_p), -math.inf)


class Adjustment:
    """The request's penalties, bias, bans and constraint on the logits, in this order. The repetition penalty is on
    prompt and answer, presence and frequency penalty on the answer. tokens: the prompt and the answer's beginning,
    which has `answered` tokens."""

    def __init__(
        self,
        sampling: Sampling,
        tokens: Sequence[int],
        answered: int,
        constraint: Constraint | None = None,
        bans: Bans | None = None,
    ) -> None:
        self._sampling = sampling
        self._constraint = constraint
        self._bans = bans
        self._tokens = tokens
        self._answered = answered
        self._seen: torch.Tensor | None = None  # [vocab], of prompt and answer
        self._counts: torch.Tensor | None = None  # [vocab], in the answer
        self._bias: torch.Tensor | None = None  # [vocab]
        self._started = False

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: [vocab], float32. Called before each token, which is then passed to `add`. Both raise RequestError
        if the answer cannot keep its form."""
        if not self._started:
            self._start(logits.shape[0])
        return self._constrained(self._biased(self._counted(self._repeated(logits))))

    def add(self, token: int) -> None:
        """Count one more token of the answer."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1.0
        if self._bans is not None:
            self._bans.add(token)
        if self._constraint is not None:
            self._constraint.accept(token)
            self._check()

    def _start(self, vocab: int) -> None:
        self._started = True
        sampling, tokens = self._sampling, torch.tensor(list(self._tokens), dtype=torch.long)
        if sampling.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab, dtype=torch.bool)
            self._seen[tokens] = True
        if sampling.presence_penalty or sampling.frequency_penalty:
            answer = tokens[len(tokens) - self._answered :]
            self._counts = torch.zeros(vocab).index_add_(0, answer, torch.ones(len(answer)))
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._bias = torch.zeros(vocab).index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=torch.float32))

    def _repeated(self, logits: torch.Tensor) -> torch.Tensor:
        penalty = self._sampling.repetition_penalty
        if self._seen is None:
            return logits
        return torch.where(self._seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def _counted(self, logits: torch.Tensor) -> torch.Tensor:
        if self._counts is None:
            return logits
        logits = logits - self._counts * self._sampling.frequency_penalty
        return logits - (self._counts > 0).float() * self._sampling.presence_penalty

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._bias is None else logits + self._bias

    def _constrained(self, logits: torch.Tensor) -> torch.Tensor:
        allowed = self._constraint.allowed() if self._constraint is not None else None
        self._check()
        if allowed is None:
            return self._without_banned(logits)
        if self._bans is not None:
            allowed = self._bans.within(allowed)
        return torch.where(torch.from_numpy(fitted(allowed, logits.shape[-1])), logits, -math.inf)

    def _without_banned(self, logits: torch.Tensor) -> torch.Tensor:
        banned = self._bans.now(logits.shape[-1]) if self._bans is not None else ()
        return logits.index_fill(0, torch.tensor(banned), -math.inf) if banned else logits

    def _check(self) -> None:
        if self._constraint is not None and self._constraint.error is not None:
            raise self._constraint.error
