"""The two PrefillRuns: a prompt whose KV is emitted, and a prompt with its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from disagg.engines.base import PrefillTiming, PromptAndAnswer, Token
from disagg.engines.transformers.cache import PreallocatedCache
from disagg.engines.transformers.forward import Forward
from disagg.engines.transformers.sampling import Sampler
from disagg.kv.sent import ComputeStep


class PromptRun:
    """A PrefillRun of all `tokens`, of which the cache already has some. chunk_tokens: the most per step.
    on_done: called with the cache once all tokens are in it."""

    def __init__(
        self,
        forward: Forward,
        cache: PreallocatedCache,
        tokens: Sequence[int],
        chunk_tokens: int,
        on_done: Callable[[PreallocatedCache], None] = lambda cache: None,
    ) -> None:
        self._forward = forward
        self._cache: PreallocatedCache | None = cache
        self._tokens = tokens
        self._chunk_tokens = chunk_tokens
        self._on_done = on_done
        self.held = int(cache.get_seq_length())
        self._computed = self.held
        self._started = time.monotonic()
        self._steps: list[ComputeStep] = []

    @property
    def remaining(self) -> int:
        return len(self._tokens) - self._computed

    @property
    def done(self) -> bool:
        return self.remaining == 0

    @property
    def timing(self) -> PrefillTiming:
        return PrefillTiming(self._started, self._computed - self.held, tuple(self._steps))

    @property
    def cache(self) -> PreallocatedCache:
        """The run's cache, until it is closed."""
        assert self._cache is not None, "the run is closed"
        return self._cache

    def step(self, max_tokens: int | None = None) -> None:
        began = time.monotonic()
        end = min(len(self._tokens), self._computed + min(max_tokens or self._chunk_tokens, self._chunk_tokens))
        self._forward.layers(self._tokens[self._computed : end], self.cache)
        self._forward.finish()
        self._computed = end
        self._steps.append(ComputeStep(began, time.monotonic()))
        if self.done:
            self._on_done(self.cache)

    def close(self) -> None:
        self._cache = None


class AnswerRun(PromptAndAnswer):
    """A PrefillRun of a prompt and its answer. prompt: computes all tokens before `last`. eos_ids: end the answer, of
    which at most `left` tokens are generated."""

    def __init__(
        self,
        forward: Forward,
        prompt: PromptRun,
        last: int,
        sampler: Sampler,
        emit: Callable[[Token], None],
        *,
        eos_ids: Collection[int],
        left: int,
    ) -> None:
        super().__init__(prompt, emit)
        self._forward = forward
        self._cached = prompt
        self._last, self._left = last, left
        self._sampler = sampler
        self._eos_ids = eos_ids

    @property
    def done(self) -> bool:
        return self._left == 0

    def _next(self) -> Token:
        token = self._sampler.next(self._forward.logits([self._last], self._cached.cache)[0])
        self._last = token.id
        self._left -= 1
        if token.id in self._eos_ids:
            self._left, token = 0, replace(token, finish="stop")
        elif self._left == 0:
            token = replace(token, finish="length")
        return token
