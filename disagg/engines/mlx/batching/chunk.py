"""How many prompt tokens one step computes.

A step that computes a chunk delays the next token of every running answer, and the engine reports progress only after
it: chunks of 2,048 tokens took over 10 s on a busy CPU at a context of 6,000. So their length follows the speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

CHUNK_S: Final = 0.5
FIRST_TOKENS: Final = 512
# Prompts that are computed together share the prompt tokens of one step; each gets at least this many. On the CPU
# backend attention allocates [prompts, heads, chunk, context] scores: with eight prompts of 4,000 tokens, the process
# of a 1 MB model grew to 1.5 GB with chunks of 2,048 tokens each, and to 0.5 GB when they shared one chunk.
LEAST_TOKENS: Final = 64


@dataclass(slots=True)
class ChunkLength:
    """The length of the next chunk: such that a step takes about CHUNK_S. most: tokens, the bound on it."""

    most: int
    _tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self._tokens = min(self.most, FIRST_TOKENS)

    def length(self, prompts: int) -> int:
        """Tokens of each of `prompts` prompts that are computed together."""
        return max(self._tokens // max(1, prompts), min(self.most, LEAST_TOKENS))

    def took(self, seconds: float) -> None:
        """The step with the last chunk took `seconds`. At most doubles the length: the last chunk of a prompt is short,
        and would show a speed that no chunk has."""
        wanted = int(self._tokens * CHUNK_S / seconds) if seconds > 0 else self.most
        self._tokens = max(min(wanted, 2 * self._tokens, self.most), min(self.most, LEAST_TOKENS))
