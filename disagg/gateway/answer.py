"""The response to a request: what happens to it is written to a caller that may disconnect, or read nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.errors import Cancelled, DisaggError
from disagg.gateway.dialects.base import AnswerEvent, Dialect, Framing, Reader, ScoredPrompt, Writer, Written, written
from disagg.gateway.dialects.problems import INTERNAL, Problem, problem_of
from disagg.gateway.watch.request import ObservedRequest
from disagg.http.requests import disconnected
from disagg.http.stream import BodyParts, running

STOPPED = Problem(503, "server_error", "gateway_stopped", "the gateway is stopping; the answer is not complete")

log = logging.getLogger("disagg.gateway")


@dataclass(frozen=True, slots=True)
class ResponseTimes:
    """Seconds. first: without an event, a stream starts with a comment; until then an error has its HTTP status.
    keep_alive: between two comments. stall: a caller that reads nothing for this long counts as disconnected."""

    first: float = 2.0
    keep_alive: float = 10.0
    stall: float = 60.0


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request that has a place, which it gives back when it ends. writer: writes its answer."""

    dialect: Dialect
    observed: ObservedRequest
    events: AsyncGenerator[AnswerEvent, None]
    give_back: Callable[[], None]
    writer: Writer

    async def perform(self, send: Callable[[Iterable[Written]], Awaitable[None]] | None) -> Problem | Sequence[Written]:
        """Run it to its end: what is left to send then, or why it failed. send: sends objects of its stream; None: it
        is answered by one object. Raises Cancelled if the caller reads nothing."""
        async with aclosing(self.events) as events:
            try:
                async for event in events:
                    if isinstance(event, ScoredPrompt):  # as large as MAX_SCORES allows: 3 s for others to wait
                        objects = await asyncio.to_thread(written, self.writer, event)
                        if send is not None:
                            await send(objects)
                    elif send is not None:
                        await send(written(self.writer, event))
                completions = self.observed.completions
                if send is not None:
                    return [*self.writer.end(completions)]
                if self.observed.head.request.scoring is None:
                    return [self.writer.whole(completions)]
                return [await asyncio.to_thread(self.writer.whole, completions)]
            except DisaggError as error:
                if isinstance(error, Cancelled) and send is not None:
                    raise
                return problem_of(error)
            except Exception as error:
                log.error("internal_error", exc_info=error)
                return INTERNAL

    def ended(self, problem: Problem | None = None) -> None:
        """It is over, and failed if there is a problem. A second call does nothing."""
        if self.observed.state is None:
            self.give_back()
            self.observed.ended(problem)


class AnswerResponse(Response):
    """The response to one request."""

    def __init__(self, request: AcceptedRequest, times: ResponseTimes) -> None:
        super().__init__()
        self._request, self._times = request, times
        self._problem: Problem | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect, writer = self._request.dialect, self._request.writer
        stream = self._request.observed.head.request.stream
        exchange = Exchange(scope, send, dialect.framing, self._times, stream=stream)
        refusal = problem_response(dialect, STOPPED)
        await exchange.perform(
            self._perform(exchange), receive, writer.error(STOPPED), refusal, lambda: self._request.ended(self._problem)
        )

    async def _perform(self, exchange: Exchange) -> None:
        dialect, writer = self._request.dialect, self._request.writer
        ending = await self._request.perform(exchange.objects if exchange.stream else None)
        if not isinstance(ending, Problem):
            await (exchange.complete(ending) if exchange.stream else exchange.respond(json_response(ending[0])))
            return
        self._problem = ending
        if exchange.started:
            await exchange.cut(writer.error(ending))
        else:
            await exchange.respond(problem_response(dialect, ending))


class Exchange(BodyParts):
    """Sends one response: objects, framed as a stream of this kind, or a response that is not sent in parts."""

    def __init__(self, scope: Scope, send: Send, framing: Framing, times: ResponseTimes, *, stream: bool) -> None:
        super().__init__(scope, send, framing.media_type, times.stall)
        self.stream = stream
        self._framing, self._times = framing, times

    async def objects(self, objects: Iterable[Written]) -> None:
        """Send these objects. Raises Cancelled if the caller stalls."""
        await self.part(self._framing.join(objects))

    async def complete(self, objects: Iterable[Written]) -> None:
        """Send the last objects of a complete stream."""
        await self.end(self._framing.join(objects) + self._framing.done)

    async def cut(self, objects: Iterable[Written]) -> None:
        """Send the last objects of a stream that is not complete."""
        await self.end(self._framing.join(objects))

    async def respond(self, response: Response) -> None:
        """Send a response that is not sent in parts. Its request has been read."""
        await response({"type": "http"}, _never, self.send)

    async def perform(
        self,
        work: Coroutine[Any, Any, None],
        receive: Receive,
        cut: Iterable[Written],
        refusal: Response,
        ended: Callable[[], None],
    ) -> None:
        """Run `work`, which sends the response, until it ends or the caller disconnects.

        If the gateway's stop cuts it, `cut` are the last objects of a stream that has begun, and `refusal` is sent
        instead of a response that has not. ended: is called once.
        """
        others = [disconnected(receive)]
        if self.stream and (comment := self._framing.keep_alive):
            others.append(self.keep_alive(lambda: comment, self._times.first, self._times.keep_alive))
        try:
            async with running(work, *others) as tasks:
                writing = tasks[0]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:  # the gateway stops and does not wait any longer
                    writing.cancel()
                    with suppress(Exception):
                        await (self.cut(cut) if self.started else self.respond(refusal))
        finally:
            ended()
        # A stop that is pressed leaves no time for the task to end.
        if writing.done() and not writing.cancelled() and not isinstance(writing.exception(), Cancelled):
            writing.result()


def problem_response(dialect: Reader, problem: Problem) -> Response:
    """A problem as clients of this dialect read it."""
    return json_response(dialect.error(problem), problem.status, problem.headers)


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A body as JSON."""
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")


async def _never() -> Any:
    raise AssertionError("a response without a body to read")
