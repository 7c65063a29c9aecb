"""What happens to a request while it is answered, in the gateway's own form. A dialect writes it to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.api.events import TokenLogprob
from disagg.api.requests import ToolCall
from disagg.inference.types import Completion


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """More of answer number `choice`: the tokens of a decode step or several. They have completed reasoning, then text,
    then tool calls."""

    choice: int
    text: str
    tokens: tuple[TokenLogprob, ...]
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def joined(self, later: AnswerPiece) -> AnswerPiece | None:
        """Both in one; None if that would change the order of what they hold, or which tokens belong to the text."""
        if self.tool_calls or (self.reasoning and later.text) or (self.text and later.reasoning):
            return None
        return AnswerPiece(
            self.choice,
            self.text + later.text,
            self.tokens + later.tokens,
            self.reasoning + later.reasoning,
            later.tool_calls,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """Answer number `choice` is complete."""

    choice: int
    completion: Completion


AnswerEvent = AnswerPiece | Finished


def uncounted(completion: Completion, tokens: int) -> int:
    """How many tokens of the answer were counted at its end only, as by a whole-request host. tokens: those that
    arrived one by one."""
    return max(0, completion.metrics.completion_tokens - tokens) if completion.metrics.method == "whole" else 0


class Usage(NamedTuple):
    """Tokens of all answers to one request. A prompt that is answered several times counts once. cached_tokens: of the
    prompts, whose KV the decode hosts had from earlier requests. reasoning_tokens: of the answers."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int

    @classmethod
    def of(cls, completions: Sequence[Completion], n: int) -> Usage:
        """completions: by number of the answer, `n` for each prompt."""
        figures = [completion.metrics for completion in completions]
        return cls(
            sum(one.prompt_tokens for one in figures[::n]),
            sum(one.completion_tokens for one in figures),
            sum(one.held_tokens for one in figures[::n]),
            sum(one.reasoning_tokens for one in completions),
        )
