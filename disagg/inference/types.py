"""What the public Client returns and streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from disagg.api.events import FinishReason, PromptToken, TokenLogprob
from disagg.api.names import RequestPhase
from disagg.api.requests import ToolCall
from disagg.inference.attempt import Method, Reason
from disagg.inference.metrics import Metrics


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """A piece of a streamed answer: the tokens of one or more decode steps and the text that became certain with them.

    reasoning, tool_calls: the same of an answer to a chat, if the model reasons or calls tools; reasoning precedes the
    text and calls follow it. arrived: time.monotonic() when the piece arrived here, however late it is read from the
    stream. note: what the caller should know about the request meanwhile, such as that another host goes on with it;
    such a chunk has no text. A Struct of msgspec, since one is made for each token: 0.1 us instead of 1.0.
    """

    text: str
    tokens: tuple[TokenLogprob, ...]
    arrived: float = 0.0
    note: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `warnings`: what the user should know, e.g. "Using fallback mode - slower performance".
    reasoning, tool_calls: of an answer to a chat. reasoning_tokens: of `tokens`. stop: the stop string that ended
    it, empty if none did."""

    text: str
    tokens: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    metrics: Metrics
    warnings: tuple[str, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_tokens: int = 0
    stop: str = ""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What a model gives the tokens of a prompt. metrics: as of an answer without tokens."""

    tokens: tuple[PromptToken, ...]
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a request is. reason: why these hosts and this method. prompt_tokens, held_tokens: 0 until the decode host
    has counted them."""

    phase: RequestPhase
    method: Method
    prefill_server: str | None
    decode_server: str | None
    prompt_tokens: int = 0
    held_tokens: int = 0
    reason: Reason = "first choice"


Watch = Callable[[Stage], None]
"""Is called whenever a request comes to another stage, on the event loop. It must not raise."""


def unwatched(_: Stage) -> None:
    """The Watch of requests that nobody watches."""
