"""Scores of a prompt's tokens, computed chunk by chunk over caches of its own, outside the batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy
from mlx_lm.models.cache import make_prompt_cache

from disagg.engines.base import ChunkScores
from disagg.engines.mlx.passes import ChunkLength


class ScoringPass:
    """Scores all of `tokens` but the first. All calls come from the engine's thread. chunk_tokens: the most that are
    computed together. top: how many alternatives each has."""

    def __init__(self, model: Any, tokens: Sequence[int], top: int, chunk_tokens: int) -> None:
        self._model, self._tokens, self._top, self._chunk = model, list(tokens), top, ChunkLength(chunk_tokens)
        self._caches: Any = make_prompt_cache(model)
        self._first = 0

    @property
    def remaining(self) -> int:
        """Tokens that are not scored yet."""
        return len(self._tokens) - 1 - self._first

    def step(self, most: int | None = None) -> ChunkScores:
        """The scores of the next chunk, of at most so many tokens."""
        began, length = time.monotonic(), self._chunk.length(1)
        end = min(len(self._tokens) - 1, self._first + min(length, most or length))
        ids, following = self._tokens[self._first : end], self._tokens[self._first + 1 : end + 1]
        logits = self._model(mx.array([ids]), cache=self._caches)[0].astype(mx.float32)
        scores = _reduced(logits, mx.array(following), self._top)
        mx.eval([cache.state for cache in self._caches])
        self._first = end
        self._chunk.took(time.monotonic() - began)
        return scores

    def close(self) -> None:
        """Let go of the caches."""
        self._caches = None


def _reduced(logits: Any, following: Any, top: int) -> ChunkScores:
    """logits: [tokens, vocab], float32, each row before the token of `following` at its place."""
    chosen = mx.take_along_axis(logits, following[:, None], axis=-1)
    sums = mx.logsumexp(logits, axis=-1, keepdims=True)
    ranks = (logits > chosen).sum(-1) + 1
    top = min(top, logits.shape[-1])
    best = mx.argpartition(-logits, top - 1, axis=-1)[:, :top] if top else mx.zeros((len(following), 0), mx.int32)
    values = mx.take_along_axis(logits, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    best, values = mx.take_along_axis(best, order, axis=-1), mx.take_along_axis(values, order, axis=-1)
    return ChunkScores(
        numpy.array((chosen - sums)[:, 0]),
        numpy.array(ranks.astype(mx.int32)),
        numpy.array(best.astype(mx.int32)),
        numpy.array(values - sums),
    )
