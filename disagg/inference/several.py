"""Send one prompt to several models at the same time and collect their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.errors import DisaggError
from disagg.inference.stream import AsyncStream
from disagg.inference.types import Completion

OpenStream = Callable[..., AsyncStream]
"""AsyncClient.stream, or what behaves like it."""


@dataclass(slots=True)
class Answer:
    """One model's answer: what has arrived, and at its end either `completion` or `error`. `wall`: seconds."""

    model: str
    text: str = ""
    tokens: int = 0
    wall: float = 0.0
    completion: Completion | None = None
    error: DisaggError | None = None

    def to_json(self) -> dict[str, Any]:
        """The answer as `--json` prints it; token log-probabilities only if there are alternatives."""
        if self.completion is None:
            return {"model": self.model, "text": self.text, "error": self.error.to_json() if self.error else None}
        done = self.completion
        body: dict[str, Any] = {
            "model": self.model,
            "text": done.text,
            "finish_reason": done.finish_reason,
            "warnings": list(done.warnings),
            "metrics": done.metrics.to_json(),
        }
        if any(token.top for token in done.tokens):
            body["tokens"] = [token.to_json() for token in done.tokens]
        return body


def ignore(answer: Answer, text: str) -> None:
    """Show nothing while the answers arrive."""


async def ask(
    stream: OpenStream,
    answers: Sequence[Answer],
    request: Mapping[str, Any],
    arrived: Callable[[Answer, str], None] = ignore,
) -> float:
    """Fill all answers at the same time; returns the wall time in seconds. A model's error ends its own answer only.

    `arrived(answer, text)` is called with each new piece of text. What it raises ends all answers and is raised here.
    If this is cancelled, the answers keep the text that has arrived.
    """
    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(_ask_one(stream, answer, request, arrived))
    except ExceptionGroup as raised:  # the cause itself, such as a broken pipe
        raise raised.exceptions[0] from None
    return time.monotonic() - began


async def _ask_one(
    stream: OpenStream, answer: Answer, request: Mapping[str, Any], arrived: Callable[[Answer, str], None]
) -> None:
    began = time.monotonic()
    try:
        async with stream(answer.model, **request) as chunks:
            try:
                async for chunk in chunks:
                    answer.tokens += len(chunk.tokens)
                    answer.text += chunk.text
                    arrived(answer, chunk.text)
            finally:
                answer.text = chunks.text
        answer.completion = chunks.completion
        arrived(answer, "")
    except DisaggError as error:
        answer.error = error
    answer.wall = time.monotonic() - began
