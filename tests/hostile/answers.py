"""What a lying host may send instead of an answer, one lie each. A new field or event is put under it with one line.

Each lie is the script of a decode host (see tests.inference.scripted), whose model has the tokens 0 to VOCABULARY - 1.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from msgspec.structs import replace

from disagg.api.events import DoneEvent, Event, RefutedEvent, ShippedEvent
from disagg.errors import DisaggError, HandoffError
from tests.inference.scripted import Body, Script, done, progress, slot, tokens, whole

VOCABULARY: Final = 1000


def _ending(**changed: Any) -> Script:
    """An answer that is right until its end, whose fields are changed."""

    async def script(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
        async for event in whole(body):
            yield replace(event, **changed) if isinstance(event, DoneEvent) else event

    return script


def _sending(*events: Event | DisaggError, times: int = 1) -> Script:
    """These events, so many times, after the first token of the answer."""

    async def script(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
        yield tokens(len(body.get("answer_tokens", ())))
        for _ in range(times):
            for event in events:
                yield event

    return script


async def _more_than_asked_for(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
    for token in range(body["sampling"]["max_tokens"] + 1):
        yield tokens(token)
    yield done(body)


async def _tokens_for_ever(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
    for token in range(VOCABULARY):
        yield tokens(token)


def _for_ever(event: Event) -> Script:
    """An answer that never goes on, and states this instead."""

    async def script(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
        yield tokens(len(body.get("answer_tokens", ())))
        while True:
            yield event

    return script


async def _nothing(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
    yield replace(done(body), completion_tokens=0)


def _shipping(**changed: Any) -> Script:
    """The KV was sent, and the figures are wrong."""

    async def script(body: Body) -> AsyncGenerator[Event | DisaggError, None]:
        figures = ShippedEvent(
            prompt_tokens=len(body["tokens"]),
            computed_tokens=len(body["tokens"]) - 1,
            kv_bytes=1,
            kv_wire="as-is",
            tokenise_s=0.0,
            queue_s=0.0,
            compute_s=0.0,
            hidden_transfer_s=0.0,
            exposed_transfer_s=0.0,
        )
        yield replace(figures, **changed)

    return script


SHIPPED_LIES: Final[Mapping[str, Script]] = {
    "another prompt": _shipping(prompt_tokens=1),
    "more of the prompt computed than there is": _shipping(computed_tokens=1 << 20),
    "more of the prompt held than there is": _shipping(held_tokens=1 << 20),
}
"""Of a prefill host, about KV that the decode host has accepted."""
LIES: Final[Mapping[str, Script]] = {
    "a token beyond the vocabulary": _sending(tokens(VOCABULARY)),
    "a token of 2^31": _sending(tokens(1 << 31)),
    "a negative token": _sending(tokens(-1)),
    "one token more than asked for": _more_than_asked_for,
    "tokens for ever": _tokens_for_ever,
    "text without a token": _sending(replace(tokens(1), tokens=())),
    "nothing for ever": _sending(replace(tokens(1), text="", tokens=()), times=5000),
    "a text of 1 MB": _sending(replace(tokens(1), text="x" * (1 << 20))),
    "reasoning of 1 MB": _sending(replace(tokens(1), reasoning="x" * (1 << 20))),
    "a phase of 1 MB": _sending(progress("x" * (1 << 20))),
    "negative beats": _sending(progress("generating", beats=-1)),
    "an error of 1 MB": _sending(HandoffError("x" * (1 << 20), "y" * (1 << 20))),
    "an event of 5 MB": _sending(replace(tokens(1), text="x" * (5 << 20))),
    "slots for ever": _for_ever(slot({"tokens": [1, 2, 3]})),
    "refutations for ever": _for_ever(RefutedEvent(sender="p", blamed=True, message="")),
    "an end without a token": _nothing,
    "fewer tokens counted than sent": _ending(completion_tokens=3),
    "more tokens counted than sent": _ending(completion_tokens=5),
    "negative tokens counted": _ending(completion_tokens=-4),
    "another prompt": _ending(prompt_tokens=1),
    "more of the prompt computed than there is": _ending(computed_prompt_tokens=1 << 20),
    "more of the prompt audited than there is": _ending(audited_tokens=1 << 20),
    "a refutation of 1 MB": _sending(RefutedEvent(sender="p", blamed=True, message="x" * (1 << 20))),
    "a refutation by a sender of 1 MB": _sending(RefutedEvent(sender="x" * (1 << 20), blamed=True, message="")),
    "a negative count of the prompt computed": _ending(computed_prompt_tokens=-1),
    "more of the prompt held than there is": _ending(held_tokens=1 << 20),
    "more reasoning than answer": _ending(reasoning_tokens=1 << 20),
    "a tool call that is none": _ending(finish_reason="tool_calls"),
    "a stop string that nobody asked for": _ending(finish_reason="stop", stop="x"),
    "a reason of 1 MB": _ending(local="x" * (1 << 20)),
}
