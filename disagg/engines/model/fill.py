"""Filling in the middle: a prompt of what precedes a gap and what follows it, with the marks that code models know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from disagg.errors import RequestError


@dataclass(frozen=True, slots=True)
class FillMarks:
    """prefix, suffix: before the text that precedes the gap and the one that follows it. middle: before what fills it;
    may be empty. suffix_first: the text that follows the gap comes first. ends: tokens that a model writes after
    it."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False
    ends: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.prefix, self.suffix, self.middle) if mark)

    def prompt(self, before: str, after: str) -> str:
        """The prompt for the gap between these texts."""
        parts = [self.prefix + before, self.suffix + after]
        return "".join(reversed(parts) if self.suffix_first else parts) + self.middle


KNOWN: Final = (
    # Qwen coder, CodeGemma, Granite 4
    FillMarks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|endoftext|>"),
    ),
    # StarCoder, Granite 3
    FillMarks(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<fim_pad>", "<file_sep>", "<filename>", "<repo_name>", "<|endoftext|>"),
    ),
    # DeepSeek
    FillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>",)),
    # Codestral
    FillMarks("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
    # Seed-Coder
    FillMarks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
)
"""As the models' own pages write them. A tokenizer with another family's marks would fill the gap badly, or not."""


def marks_of(added: Mapping[str, int]) -> FillMarks | None:
    """The marks of a model whose tokenizer adds these tokens to its vocabulary; None if it has none."""
    return next((one for one in KNOWN if all(mark in added for mark in one.marks)), None)


def ends_of_fill(added: Mapping[str, int]) -> tuple[int, ...]:
    """The tokens that end what fills a gap: its own marks among them, as the text of another file begins there."""
    found = marks_of(added)
    return tuple(added[mark] for mark in (*found.marks, *found.ends) if mark in added) if found is not None else ()


def not_known() -> RequestError:
    """The error for a gap that the model cannot fill."""
    return RequestError(
        "suffix: this model's tokenizer has no tokens for filling in the middle", "leave it out, or ask another model"
    )
