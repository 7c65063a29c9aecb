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
        self._words = _Words([word for word in words if len(word) > 1])
        self._count = 0
        for token in answer:
            self.add(token)

    @property
    def reads(self) -> bool:
        """Whether `add` needs to know the tokens, and not only that there is one more."""
        return bool(len(self._words.last))

    def add(self, token: int) -> None:
        """The next token of the answer."""
        self._count += 1
        if self.reads:
            self._words.add(token)

    def now(self, vocab: int) -> list[int]:
        """The tokens below `vocab` that may not come next."""
        found = self._always + (self._ends if self._count < self._until else [])
        found += self._words.now() if self.reads else []
        return [token for token in found if token < vocab]

    def within(self, allowed: np.ndarray[Any, np.dtype[np.bool_]]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """What is left of the tokens [vocab] that a form allows; all of them if nothing is: the form goes first."""
        rest = allowed.copy()
        rest[self.now(len(allowed))] = False
        return rest if rest.any() else allowed


class _Words:
    """Words of several tokens, and how far the end of the answer matches each. last: the last token of each. All are
    followed at once: 256 words of 254 tokens take 22 us for each token of an answer, two of two take 4."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        longest = max((len(word) - 1 for word in words), default=0)
        self.last = np.array([word[-1] for word in words], dtype=np.int64)
        self._lengths = np.array([len(word) - 1 for word in words], dtype=np.int64)
        self._before = np.full((len(words), longest), -1, dtype=np.int64)
        for row, word in zip(self._before, words, strict=True):
            row[: len(word) - 1] = word[:-1]
        self._matched = np.zeros((len(words), longest + 1), dtype=np.bool_)  # so many tokens of the word
        self._matched[:, 0] = True

    def add(self, token: int) -> None:
        self._matched[:, 1:] = self._matched[:, :-1] & (self._before == token)

    def now(self) -> list[int]:
        """The last tokens of words whose other ones have just been written."""
        complete = self._matched[np.arange(len(self.last)), self._lengths]
        return sorted(set(self.last[complete].tolist()))


def bans(
    sampling: Sampling, eos_ids: Collection[int], words: Sequence[Sequence[int]], answer: Sequence[int]
) -> Bans | None:
    """The bans of one answer, None if there are none. words: the tokens of its bad words. answer: its first tokens."""
    if not sampling.min_tokens and not words:
        return None
    return Bans(ends_of(sampling, eos_ids), sampling.min_tokens, words, answer)
