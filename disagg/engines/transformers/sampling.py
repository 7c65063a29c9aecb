"""Choose the next token from logits, per request, in transformers' order:

`adjust`, temperature, top-k, top-p, min-p, draw. `engines/mlx/sampling.py` does the same in mlx, step for step,
so that both draw the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from disagg.api.sampling import Sampling
from disagg.engines.base import Token
from disagg.engines.model import draw
from disagg.engines.model.constraint import Constraint
from disagg.engines.transformers.adjust import Adjustment


class Sampler:
    """Chooses the tokens of one request. tokens: of the prompt and of the answer's beginning. answered: how many of
    them belong to the answer."""

    def __init__(
        self, sampling: Sampling, tokens: Sequence[int], answered: int = 0, constraint: Constraint | None = None
    ) -> None:
        self._sampling = sampling
        self._seed = draw.new_seed() if sampling.seed is None else sampling.seed
        self._position = answered
        self._adjust = Adjustment(sampling, tokens, answered, constraint)

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
