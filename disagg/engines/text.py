"""Between text and tokens: prompts to ids, ids to streamed text, stop strings. Uses transformers' tokenizers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Messages = Sequence[Mapping[str, str]]


class PromptTokenizer(Protocol):
    """The tokenizer of one model, the same code on every host."""

    @property
    def digest(self) -> str:
        """Short hash of vocabulary, merges, normaliser and pre-tokeniser."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode(self, prompt: str | Messages | Sequence[int]) -> list[int]:
        """Token ids of a text prompt, of chat messages through the chat template, or the ids given.
        RequestError for an empty prompt, unusable messages or ids outside the vocabulary."""
        ...

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A fresh detokenizer for one answer."""
        ...


class TextStream(Protocol):
    """Incremental detokenizer with stop strings. Never emits half a character or a possible beginning of a stop."""

    def push(self, token: int) -> str:
        """Text that became certain with this token, maybe empty."""
        ...

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        ...

    @property
    def stopped(self) -> bool:
        """A stop string was met: the text already returned ends right before it."""
        ...
