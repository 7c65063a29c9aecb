"""Which tokens may not come next in an answer: one that ends it too early, or one that completes a bad word."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from disagg.api.sampling import Sampling


def ends_of(sampling: Sampling, eos_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end an answer."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_ids))


class Bans:
    """What may not come next in one answer. Both frameworks' samplers use it, so that they choose alike."""

    def __init__(
        self,
        ends: Collection[int] = (),
        until: int = 0,
        words: Sequence[Sequence[int]] = (),
        answer: Sequence[int] = (),
    ) -> None:
        """ends: tokens that may not be among the first `until`. words: of these the last token may not follow the
        others. answer: its first tokens, which are given."""
        self._ends = sorted(ends)
        self._until = until
        self._always = sorted({word[0] for word in words if len(word) == 1})
        self._words = [(tuple(word[:-1]), word[-1]) for word in words if len(word) > 1]
        self._longest = max((len(before) for before, _ in self._words), default=0)
        self._last = tuple(answer[-self._longest :]) if self._longest else ()
        self._count = len(answer)

    @property
    def reads(self) -> bool:
        """Whether `add` needs to know the tokens, and not only that there is one more."""
        return bool(self._words)

    def add(self, token: int) -> None:
        """The next token of the answer."""
        self._count += 1
        if self._longest:
            self._last = (*self._last, token)[-self._longest :]

    def now(self, vocab: int) -> list[int]:
        """The tokens below `vocab` that may not come next."""
        found = self._always + (self._ends if self._count < self._until else [])
        found += [last for before, last in self._words if self._last[len(self._last) - len(before) :] == before]
        return [token for token in found if token < vocab]

    def within(self, allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """What is left of the tokens [vocab] that a form allows; all of them if nothing is: the form goes first."""
        rest = allowed.copy()
        rest[self.now(len(allowed))] = False
        return rest if rest.any() else allowed


def bans(
    sampling: Sampling, eos_ids: Collection[int], words: Sequence[Sequence[int]], answer: Sequence[int]
) -> Bans | None:
    """The bans of one answer, None if there are none. words: the tokens of its bad words. answer: its first tokens."""
    if not sampling.min_tokens and not words:
        return None
    return Bans(ends_of(sampling, eos_ids), sampling.min_tokens, words, answer)
