"""A request in the gateway's own form. A dialect makes it from its body; nothing else depends on the dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict

from disagg.api.requests import DEFAULT_DEADLINE_S, MAX_DEADLINE_S, Messages

MAX_CHOICES: Final = 16
"""Answers to one request: prompts times `n`."""

SEEDS: Final = 1 << 63
"""A seed is below."""

DEFAULT_MAX_TOKENS: Final = 4096
"""The longest answer to a request that names no bound, if the context leaves as much: a decode host reserves room for
the KV of prompt and answer."""

SLOWEST_TOKENS_S: Final = 5.0
"""Tokens per second of the slowest answer that is complete at its deadline."""


def answer_length(given: int | None) -> dict[str, Any]:
    """The options of AsyncClient.stream that bound the answer; given: what the caller has set, in tokens."""
    return {"max_tokens": DEFAULT_MAX_TOKENS, "fit_context": True} if given is None else {"max_tokens": given}


def deadline_s(max_tokens: int) -> float:
    """Seconds for a request with an answer of at most so many tokens: those of any request, and more for an answer
    that takes longer even if nothing goes wrong. A host that is stuck is noticed in seconds, whatever the deadline."""
    return min(MAX_DEADLINE_S, DEFAULT_DEADLINE_S + max(0, max_tokens) / SLOWEST_TOKENS_S)


def thinking(on: bool) -> dict[str, Any]:
    """The variables of chat templates that turn a model's reasoning on or off, under both names that templates use."""
    return {"enable_thinking": on, "thinking": on}


class Prompt(TypedDict, total=False):
    """One prompt in one of the forms that AsyncClient takes."""

    prompt: str
    messages: Messages
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class CalledAs:
    """The caller's name of a function. namespace: of its tool, None if it has none."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRequest:
    """What a caller asks for.

    prompts: each is answered `n` times; the answers are numbered prompt by prompt. options: those of
    AsyncClient.stream that the caller has set. stream: send the answer while it is generated. include_usage: end a
    stream with the numbers of tokens. reasoning: the caller wants the model's reasoning, if its dialect makes a choice.
    seal_reasoning: it is also sent in a form that agents send back as it is. called_as: the caller's names of functions
    that have another name in the prompt, by that name. left_out: a line for each part of the request that is not in the
    prompt, or not enforced; the answer's warnings begin with them. echoed: fields of the body that the answer repeats.
    """

    model: str
    prompts: tuple[Prompt, ...]
    n: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    include_usage: bool = False
    reasoning: bool = True
    seal_reasoning: bool = False
    called_as: Mapping[str, CalledAs] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    echoed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    def arguments(self, choice: int) -> dict[str, Any]:
        """The arguments of AsyncClient.stream for one answer.

        The first answer to a prompt leaves its KV to the others. Answers to the same prompt differ if the caller has
        set a seed: each has its own, counted up from that one.
        """
        prompt, repetition = divmod(choice, self.n)
        options = dict(self.options)
        if self.n > 1 and not repetition:
            options["hold_prompt"] = True
        if options.get("seed") is not None:
            seed = options["seed"] + repetition
            options["seed"] = seed - SEEDS if options["seed"] < SEEDS <= seed else seed
        timeout = deadline_s(options.get("max_tokens", DEFAULT_MAX_TOKENS))
        return {"model": self.model, **self.prompts[prompt], **options, "timeout": timeout}
