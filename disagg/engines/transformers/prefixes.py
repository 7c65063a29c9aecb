"""The KV of finished prompts, for later prompts that begin alike: the least recently used go first.

Full layers can be shared up to any token. A sliding layer has only its last rows, so that a prompt with such layers can
be shared up to its end, or a few tokens before it, or anywhere while no window was full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

LEAST_TOKENS = 64
"""A shorter common beginning is computed: sharing it would save less than it costs."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldRows:
    """The rows of one layer from token `first` on, [1, kv_heads, rows, dim]. window: None for a full layer."""

    first: int
    keys: torch.Tensor
    values: torch.Tensor
    window: int | None = None

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def cover(self, tokens: int, more: bool) -> bool:
        """Whether a prompt can go on after these tokens: has the rows that the next tokens attend to, and those that
        the layout keeps if there are no more tokens."""
        return self.window is None or self.first <= max(0, tokens - self.window + more)


@dataclass(frozen=True, slots=True, eq=False)
class HeldPrompt:
    """A finished prompt and its KV. salt: only prompts with the same salt may share it."""

    salt: str
    tokens: numpy.ndarray
    layers: Sequence[HeldRows]

    @classmethod
    def of(cls, salt: str, tokens: Sequence[int], layers: Sequence[HeldRows]) -> HeldPrompt:
        return cls(salt, numpy.asarray(tokens, dtype=numpy.int64), layers)

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + sum(layer.nbytes for layer in self.layers)

    def shared(self, salt: str, tokens: numpy.ndarray) -> int:
        """How many of these tokens need not be computed."""
        if salt != self.salt:
            return 0
        common = _common(self.tokens, tokens)
        more = common < len(tokens)
        return common if all(layer.cover(common, more) for layer in self.layers) else 0


class Prefixes:
    """Held prompts of at most `max_bytes`. Used on the engine's thread; `nbytes` may be read on any."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: list[HeldPrompt] = []  # the least recently used first
        self.nbytes = 0

    def find(self, salt: str, tokens: Sequence[int]) -> tuple[HeldPrompt, int] | None:
        """The held prompt that shares the most tokens with this one, and how many; None if there are too few."""
        wanted = numpy.asarray(tokens, dtype=numpy.int64)
        shared = [(prompt.shared(salt, wanted), prompt) for prompt in self._held]
        count, best = max(shared, key=lambda one: one[0], default=(0, None))
        if best is None or count < LEAST_TOKENS:
            return None
        self._held.remove(best)
        self._held.append(best)
        return best, count

    def keep(self, prompt: HeldPrompt) -> None:
        """Hold a prompt, instead of those that it can stand for, and of others if there is no room."""
        if prompt.nbytes > self._max_bytes or len(prompt.tokens) < LEAST_TOKENS:
            return
        kept = [one for one in self._held if prompt.shared(one.salt, one.tokens) < len(one.tokens)]
        kept.append(prompt)
        while sum(one.nbytes for one in kept) > self._max_bytes:
            kept.pop(0)
        self._set(kept)

    def clear(self) -> None:
        """Hold nothing."""
        self._set([])

    def _set(self, held: list[HeldPrompt]) -> None:
        self._held = held
        self.nbytes = sum(prompt.nbytes for prompt in held)


def _common(a: numpy.ndarray, b: numpy.ndarray) -> int:
    """How many leading tokens are equal."""
    length = min(len(a), len(b))
    different = (a[:length] != b[:length]).nonzero()[0]
    return int(different[0]) if len(different) else length
