"""Send several requests at the same time and collect their answers, or what arrives of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from disagg.api.gateway import ParallelFigures
from disagg.errors import DisaggError
from disagg.inference.hosts.route import Ranking
from disagg.inference.stream import AsyncStream
from disagg.inference.types import Completion

T = TypeVar("T")
WAITING: Final = 64
"""What `together` holds until it is read; the generators hold the rest."""
OpenStream = Callable[..., AsyncStream]
"""AsyncClient.stream, or what behaves like it."""


@dataclass(slots=True)
class ModelAnswer:
    """One model's answer: what has arrived, and at its end either `completion` or `error`.

    wall: seconds from the moment that all requests were sent. notes: what happened meanwhile. ranking: the hosts that
    it may come from, if that was asked for.
    """

    model: str
    text: str = ""
    tokens: int = 0
    wall: float = 0.0
    notes: list[str] = field(default_factory=list)
    ranking: Ranking | None = None
    completion: Completion | None = None
    error: DisaggError | None = None

    def to_json(self) -> dict[str, Any]:
        """The answer as `--json` prints it; token log-probabilities only if there are alternatives."""
        body: dict[str, Any] = {"model": self.model, "text": self.text}
        if self.ranking is not None:
            body["ranking"] = self.ranking.to_json()
        if self.completion is None:
            if self.error is not None and self.error.partial is not None:
                body["token_ids"] = list(self.error.partial.token_ids)
            return {**body, "error": self.error.to_json() if self.error else None}
        done = self.completion
        body |= {
            "text": done.text,
            "finish_reason": done.finish_reason,
            "warnings": list(done.warnings),
            "metrics": done.metrics.to_json(),
        }
        if any(token.top for token in done.tokens):
            body["tokens"] = [token.to_json() for token in done.tokens]
        return body


@dataclass(frozen=True, slots=True)
class Together:
    """The answers to requests that ran at the same time, in their order, and what that was worth."""

    answers: tuple[ModelAnswer, ...]
    figures: ParallelFigures


class Watcher:
    """Callbacks while answers arrive. These do nothing; a subclass overrides those that it needs."""

    def arrived(self, answer: ModelAnswer, text: str) -> None:
        """Called with each piece of text, which `answer` already has, and once more when the answer is complete."""

    def noted(self, answer: ModelAnswer, note: str) -> None:
        """Called with each note, which `answer` already has."""


async def ask(
    stream: OpenStream,
    answers: Sequence[ModelAnswer],
    request: Mapping[str, Any],
    watcher: Watcher | None = None,
) -> float:
    """Fill all answers with the same request; otherwise as `ask_each`."""
    return await ask_each(stream, [(answer, request) for answer in answers], watcher)


async def ask_each(
    stream: OpenStream, asked: Sequence[tuple[ModelAnswer, Mapping[str, Any]]], watcher: Watcher | None = None
) -> float:
    """Fill all answers at the same time, each with its own request; returns the wall time in seconds. A model's error
    ends its own answer only.

    What the watcher raises ends all answers and is raised here. If this is cancelled, the answers keep the text that
    has arrived.
    """
    began = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for answer, request in asked:
                group.create_task(_ask_one(stream, answer, request, watcher or Watcher(), began))
    except ExceptionGroup as raised:  # the cause itself, such as a broken pipe
        raise raised.exceptions[0] from None
    return time.monotonic() - began


async def generate_all(stream: OpenStream, requests: Sequence[Mapping[str, Any]]) -> Together:
    """The answers to requests with the arguments of `generate`, by name."""
    answers = [ModelAnswer(str(request.get("model", ""))) for request in requests]
    given = [{name: value for name, value in request.items() if name != "model"} for request in requests]
    await ask_each(stream, list(zip(answers, given, strict=True)))
    return Together(tuple(answers), figures(answers))


def figures(answers: Sequence[ModelAnswer]) -> ParallelFigures:
    """What it was worth to ask for these answers at the same time."""
    return ParallelFigures.of([answer.wall for answer in answers if answer.completion is not None])


async def _ask_one(
    stream: OpenStream, answer: ModelAnswer, request: Mapping[str, Any], watcher: Watcher, began: float
) -> None:
    try:
        async with stream(answer.model, **request) as chunks:
            try:
                async for chunk in chunks:
                    answer.tokens += len(chunk.tokens)
                    answer.text += chunk.text
                    if chunk.note:
                        answer.notes.append(chunk.note)
                        watcher.noted(answer, chunk.note)
                    else:
                        watcher.arrived(answer, chunk.text)
            finally:
                answer.text = chunks.text
        answer.wall = time.monotonic() - began
        answer.completion = chunks.completion
        watcher.arrived(answer, "")
    except DisaggError as error:
        answer.wall, answer.error = time.monotonic() - began, error


async def together(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """What several generators yield, in the order of its arrival. The first failure ends them all."""
    queue: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue(WAITING)

    async def read(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for one in source:
                    await queue.put((one,))
            await queue.put(None)
        except Exception as error:  # noqa: BLE001 - whatever failed, it is raised below: nobody may wait for the rest
            await queue.put(error)

    tasks = [asyncio.ensure_future(read(source)) for source in sources]
    running = len(tasks)
    try:
        while running:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                running -= 1
            else:
                yield found[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
