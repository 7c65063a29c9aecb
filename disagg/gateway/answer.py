"""Events -> HTTP: an answer that is streamed, or sent whole. Either way it ends when its caller disconnects."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.errors import Cancelled, DisaggError
from disagg.gateway.dialects.base import AnswerEvent, Dialect, Finished, Head, uncounted, written
from disagg.gateway.dialects.problems import INTERNAL, Problem, problem_of
from disagg.gateway.exchange import STOPPED, Exchange
from disagg.inference.types import Completion, Stage

log = logging.getLogger("disagg.gateway")


class Outcome:
    """What became of one request, filled in while it is answered. n: answers per prompt. charge: is called with the
    tokens of prompts and answers as they come; a request that fails or is cancelled is charged what it has used.
    tokens: of the answers."""

    def __init__(self, n: int = 1, charge: Callable[[int], None] = lambda _: None) -> None:
        self._n, self._charge = n, charge
        self._prompts: dict[int, int] = {}
        self.completions: dict[int, Completion] = {}
        self.tokens = 0
        self.error: Problem | None = None
        self.cancelled = False

    def note(self, event: AnswerEvent) -> None:
        if isinstance(event, Finished):
            self.completions[event.choice] = event.completion
            self._prompt(event.choice, event.completion.metrics.prompt_tokens)
            self._add(uncounted(event.completion, len(event.completion.tokens)))
        else:
            self._add(len(event.tokens))

    def _add(self, tokens: int) -> None:
        self.tokens += tokens
        self._charge(tokens)

    def staged(self, choice: int, stage: Stage) -> None:
        """An answer has come to this stage."""
        self._prompt(choice, stage.prompt_tokens)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts that a host has counted. A prompt that is answered several times counts once."""
        return sum(self._prompts.values())

    def _prompt(self, choice: int, tokens: int) -> None:
        if tokens and choice // self._n not in self._prompts:
            self._prompts[choice // self._n] = tokens
            self._charge(tokens)

    @property
    def in_order(self) -> Sequence[Completion]:
        """The answers by number, once all are complete."""
        return [self.completions[choice] for choice in sorted(self.completions)]


@dataclass(frozen=True, slots=True)
class Running:
    """A request that has been accepted. ended: is called once, with what became of it."""

    dialect: Dialect
    head: Head
    events: AsyncGenerator[AnswerEvent, None]
    outcome: Outcome
    ended: Callable[[Outcome], None]


class AnswerResponse(Response):
    """The response to one request."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self._running = running
        self._dialect, self._outcome = running.dialect, running.outcome
        self._writer = running.dialect.writer(running.head)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._running.head.request.stream
        exchange = Exchange(scope, send, self._dialect.framing, stream=stream)
        work = self._stream(exchange) if stream else self._whole(exchange)
        refusal = json_response(self._dialect.error(STOPPED), STOPPED.status, STOPPED.headers)
        await exchange.perform(work, receive, self._writer.error(STOPPED), refusal, self._end)

    def _end(self, cancelled: bool) -> None:
        self._outcome.cancelled = cancelled
        self._running.ended(self._outcome)

    async def _stream(self, exchange: Exchange) -> None:
        async with aclosing(self._running.events) as events:
            try:
                async for event in events:
                    self._outcome.note(event)
                    await exchange.objects(written(self._writer, event))
                last = [*self._writer.end(self._outcome.in_order)]
            except Cancelled:
                raise
            except Exception as error:  # noqa: BLE001 - whatever failed, the caller gets its message
                self._outcome.error = problem = problem_of_any(error)
                if not exchange.started:
                    await self._send_problem(problem, exchange)
                    return
                await exchange.cut(self._writer.error(problem))
                return
        await exchange.complete(last)

    async def _whole(self, exchange: Exchange) -> None:
        async with aclosing(self._running.events) as events:
            try:
                async for event in events:
                    self._outcome.note(event)
                body = self._writer.whole(self._outcome.in_order)
            except Exception as error:  # noqa: BLE001 - whatever failed, the caller gets its message
                self._outcome.error = problem = problem_of_any(error)
                await self._send_problem(problem, exchange)
                return
        await send_response(json_response(body), exchange.send)

    async def _send_problem(self, problem: Problem, exchange: Exchange) -> None:
        response = json_response(self._dialect.error(problem), problem.status, problem.headers)
        await send_response(response, exchange.send)


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A body as JSON."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")


async def send_response(response: Response, send: Send) -> None:
    """Send a response whose request has been read."""
    await response({"type": "http"}, _never, send)


def problem_of_any(error: Exception) -> Problem:
    """The error as it is sent to a caller. A bug is logged."""
    if isinstance(error, DisaggError):
        return problem_of(error)
    log.error("internal_error", exc_info=error)
    return INTERNAL


async def _never() -> Any:
    raise AssertionError("a response without a body to read")
