"""Samplers and log-probabilities for mlx, per request, in transformers' order:

`adjust`, temperature, top-k, top-p, min-p, draw. mlx-lm's own samplers filter before the temperature and
share one global random state, so that requests in a batch change each other's draws; here every draw depends on its
request's seed and its number only. `engines/transformers/sampling.py` does the same in torch, step for step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from disagg.api.sampling import Sampling
from disagg.engines.model import draw

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


def log_softmax(logits: Any) -> Any:
    """numpy [vocab] -> numpy [vocab]."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def top_logprobs(row: Any, count: int) -> tuple[tuple[int, float], ...]:
    """(id, log-probability) of the `count` likeliest tokens of a `read_row`, likeliest first."""
    count = min(count, len(row))
    ids = np.argpartition(row, -count)[-count:]
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return tuple((int(i), float(row[i])) for i in ids)
