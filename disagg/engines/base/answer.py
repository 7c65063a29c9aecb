"""A run of a whole request: its prompt, then its answer token by token."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from disagg.engines.base.prefill import PrefillRun, PrefillTiming
from disagg.engines.base.values import Token


class PromptAndAnswer(ABC):
    """A PrefillRun. prompt: computes what comes before the first token of the answer. emit: gets each token."""

    def __init__(self, prompt: PrefillRun, emit: Callable[[Token], None]) -> None:
        self._prompt = prompt
        self._emit = emit
        self.held = prompt.held
        self._timing = prompt.timing
        self._begun = False

    @property
    def remaining(self) -> int:
        return self._prompt.remaining

    @property
    @abstractmethod
    def done(self) -> bool:
        pass

    @property
    def timing(self) -> PrefillTiming:
        """With the first token of the answer."""
        return self._timing

    def step(self, max_tokens: int | None = None) -> None:
        if self._prompt.remaining:
            self._prompt.step(max_tokens)
            self._timing = self._prompt.timing
            return
        began = time.monotonic()
        token = self._next()
        if not self._begun:
            self._begun, self._timing = True, self._timing.plus(began, time.monotonic())
        self._emit(token)

    def close(self) -> None:
        self._prompt.close()

    @abstractmethod
    def _next(self) -> Token:
        """Compute the next token of the answer."""
