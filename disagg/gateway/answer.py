"""Events -> HTTP: an answer that is streamed, or sent whole. Either way it ends when its caller disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.errors import Cancelled, DisaggError
from disagg.gateway.dialects.base import Dialect, Head
from disagg.gateway.dialects.events import Event, Finished, Piece
from disagg.gateway.dialects.problems import INTERNAL, Problem, problem_of
from disagg.http.requests import disconnected
from disagg.inference.types import Completion, Stage

FIRST_S = 2.0  # without an event, the response starts with a comment; until then an error has its HTTP status
KEEP_ALIVE_S = 10.0  # between two comments
STALL_S = 60.0  # a caller that reads nothing for this long counts as disconnected

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

    def note(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.completions[event.choice] = event.completion
            self._prompt(event.choice, event.completion.metrics.prompt_tokens)
        else:
            self.tokens += len(event.tokens)
            self._charge(len(event.tokens))

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


class Answer(Response):
    """The response to one request. `ended` is called once, with what became of it."""

    def __init__(
        self,
        dialect: Dialect,
        head: Head,
        events: AsyncGenerator[Event, None],
        outcome: Outcome,
        ended: Callable[[Outcome], None],
    ) -> None:
        super().__init__()
        self._dialect, self._head, self._events, self._outcome, self._ended = dialect, head, events, outcome, ended
        self._writer = dialect.writer(head)
        self._started = False
        self._over = False
        self._quiet = True
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._stream(send) if self._head.request.stream else self._whole(scope, receive, send)
        writing = asyncio.ensure_future(work)
        others = [asyncio.ensure_future(disconnected(receive))]
        if self._head.request.stream and self._dialect.keep_alive:
            others.append(asyncio.ensure_future(self._keep_alive(send)))
        try:
            await asyncio.wait((writing, *others), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the gateway stops and does not wait any longer
            await self._cut(writing, send)
            raise
        finally:
            for task in (writing, *others):
                task.cancel()
            await asyncio.wait((writing, *others))
            self._outcome.cancelled = writing.cancelled() or isinstance(writing.exception(), Cancelled)
            self._ended(self._outcome)
        if not self._outcome.cancelled:
            writing.result()

    async def _cut(self, writing: asyncio.Task[None], send: Send) -> None:
        """Tell the caller that the answer is not complete."""
        writing.cancel()
        if self._started:
            with suppress(Exception):
                await send(_body(self._writer.error(_STOPPED), more=False))

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    self._outcome.note(event)
                    part = self._writer.piece(event) if isinstance(event, Piece) else self._writer.finished(event)
                    await self._send(send, part)
                last = self._writer.end(self._outcome.in_order)
            except Cancelled:
                raise
            except Exception as error:  # noqa: BLE001 - whatever failed, the caller is told
                self._outcome.error = problem = _problem(error)
                if not self._started:
                    await self._send_problem(problem, send)
                    return
                last = self._writer.error(problem)
        await self._send(send, last)
        await self._send(send, b"", more=False)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    self._outcome.note(event)
                body = self._writer.whole(self._outcome.in_order)
            except Exception as error:  # noqa: BLE001 - whatever failed, the caller is told
                self._outcome.error = problem = _problem(error)
                await self._send_problem(problem, send)
                return
        await json_response(body)(scope, receive, send)

    async def _send_problem(self, problem: Problem, send: Send) -> None:
        response = json_response(self._dialect.error(problem), problem.status, problem.headers)
        await response({"type": "http"}, _never, send)

    async def _keep_alive(self, send: Send) -> None:
        await asyncio.sleep(FIRST_S)
        while True:
            if self._quiet:
                await self._send(send, self._dialect.keep_alive)
            self._quiet = True
            await asyncio.sleep(KEEP_ALIVE_S)

    async def _send(self, send: Send, part: bytes, *, more: bool = True) -> None:
        if not part and more:
            return
        self._quiet = False
        try:
            async with asyncio.timeout(STALL_S), self._sending:
                if self._over:  # a comment that waited for the end to be sent
                    return
                if not self._started:
                    self._started = True
                    headers = [(b"content-type", self._dialect.media_type.encode()), (b"cache-control", b"no-store")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                self._over = not more
                await send(_body(part, more=more))
        except TimeoutError:
            raise Cancelled(f"the caller read nothing for {STALL_S:g} s") from None


_STOPPED = Problem(503, "server_error", "gateway_stopped", "the gateway is stopping; the answer is not complete")


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A body as JSON."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")


def _body(part: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": part, "more_body": more}


def _problem(error: Exception) -> Problem:
    if isinstance(error, DisaggError):
        return problem_of(error)
    log.error("internal_error", exc_info=error)
    return INTERNAL


async def _never() -> Any:
    raise AssertionError("a response without a body to read")
