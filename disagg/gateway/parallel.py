"""POST /v1/parallel: several requests in one body, which run at the same time and are answered together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.api.base import InvalidValue
from disagg.api.parallel import (
    MAX_NAME,
    ParallelAnswer,
    ParallelBody,
    ParallelChunk,
    ParallelEnd,
    ParallelFigures,
    ParallelResult,
)
from disagg.errors import Cancelled, DisaggError, RequestError
from disagg.gateway.answer import Running, json_response, problem_of_any, send_response
from disagg.gateway.dialects import openai
from disagg.gateway.dialects.base import (
    DATA_EVENTS,
    Dialect,
    GatewayRequest,
    Written,
    written,
)
from disagg.gateway.dialects.chat import ChatCompletions
from disagg.gateway.dialects.completions import Completions
from disagg.gateway.dialects.problems import Problem
from disagg.gateway.exchange import STOPPED, Exchange

CHAT: Final = ChatCompletions()
COMPLETION: Final = Completions()
_MAX_ID: Final = 64  # characters of a request's id


def read(body: Mapping[str, Any]) -> RequestedItems:
    """The items of a body. Raises RequestError if it is no such body, two items have the same id, or no item can be
    read."""
    try:
        fields = ParallelBody.from_json(body)
    except InvalidValue as error:
        raise RequestError(str(error)) from None
    stream = bool(fields.stream)
    items = [_item(index, given, stream) for index, given in enumerate(fields.requests)]
    names = [item.id for item in items if item.id is not None]
    if len(set(names)) < len(names):
        raise RequestError("requests: two of them have the same id", "give each its own, or none")
    first = items[0].request
    if isinstance(first, DisaggError) and all(isinstance(item.request, DisaggError) for item in items):
        raise type(first)(f"requests[0].{first.message}", first.hint)
    return RequestedItems(items, stream)


@dataclass(frozen=True, slots=True)
class RequestedItems:
    """What a body asks for."""

    items: Sequence[RequestedItem]
    stream: bool


@dataclass(frozen=True, slots=True)
class RequestedItem:
    """One request of the body. dialect: that of its answer. request: what it asks for, or why it asks for nothing."""

    index: int
    id: str | None
    dialect: Dialect
    request: GatewayRequest | DisaggError


def item_id(request_id: str, index: int) -> str:
    """The id of one item, in the history and the logs, as long as ids may be."""
    end = f".{index}"
    return request_id[: _MAX_ID - len(end)] + end


def _item(index: int, given: Mapping[str, Any], stream: bool) -> RequestedItem:
    name = given.get("id")
    fields = {key: value for key, value in given.items() if key not in ("id", "stream")}
    dialect: Dialect = CHAT if "messages" in given else COMPLETION
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= MAX_NAME):
        wrong = RequestError(f"id: not a text of 1 to {MAX_NAME} characters")
        return RequestedItem(index, None, dialect, wrong)
    try:
        if ("messages" in given) == ("prompt" in given):
            raise RequestError("messages: a request has either messages or a prompt")
        return RequestedItem(index, name, dialect, replace(dialect.read(fields), stream=stream))
    except DisaggError as error:
        return RequestedItem(index, name, dialect, error)


@dataclass(frozen=True, slots=True)
class ItemRun:
    """One item: the request that runs, or why none does."""

    item: RequestedItem
    work: Running | Problem


class ParallelResponse(Response):
    """The response to one body. began: time.monotonic() when its items were sent."""

    def __init__(self, parts: Sequence[ItemRun], request_id: str, created: float, *, stream: bool) -> None:
        super().__init__()
        self._parts = parts
        self._id, self._created = f"parallel-{request_id}", int(created)
        self._is_stream = stream
        self._began = time.monotonic()
        self._open = {part.item.index: part.work for part in parts if isinstance(part.work, Running)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, send, DATA_EVENTS, stream=self._is_stream)
        work = self._stream(exchange) if self._is_stream else self._whole(exchange)
        body = openai.error_body(STOPPED)
        refusal = json_response(body, STOPPED.status, STOPPED.headers)
        await exchange.perform(work, receive, (body,), refusal, self._ended)

    def _ended(self, _: bool) -> None:
        """Report the end of the requests that were cancelled before they began to run."""
        for index in tuple(self._open):
            self._close(index)

    def _close(self, index: int) -> None:
        """Report the end of one request; without its answers or an error it was cancelled."""
        if (work := self._open.pop(index, None)) is not None:
            outcome = work.outcome
            outcome.cancelled = outcome.error is None and len(outcome.completions) < work.head.request.choices
            work.ended(outcome)

    async def _stream(self, exchange: Exchange) -> None:
        async def one(part: ItemRun) -> ParallelResult:
            result = await self._perform(part, exchange)
            await exchange.objects((result.to_json(),))
            return result

        results = await _all(one(part) for part in self._parts)
        await exchange.complete((ParallelEnd(_figures(results)).to_json(),))

    async def _whole(self, exchange: Exchange) -> None:
        results = await _all(self._perform(part, None) for part in self._parts)
        answer = ParallelAnswer(self._id, "parallel", self._created, tuple(results), _figures(results))
        await send_response(json_response(answer.to_json()), exchange.send)

    async def _perform(self, part: ItemRun, exchange: Exchange | None) -> ParallelResult:
        """Run one item to its end. exchange: to which its chunks are sent; None: its result has the answer."""
        item, work = part.item, part.work
        problem, body = (work, None) if isinstance(work, Problem) else await self._run(item, work, exchange)
        seconds = time.monotonic() - self._began
        if problem is not None:
            return ParallelResult(item.index, item.id, problem.status, seconds, item.dialect.error(problem))
        return ParallelResult(item.index, item.id, HTTPStatus.OK, seconds, msgspec.UNSET if body is None else body)

    async def _run(
        self, item: RequestedItem, work: Running, exchange: Exchange | None
    ) -> tuple[Problem | None, Mapping[str, Any] | None]:
        """The error that ended the request, if one did; and the answer, unless it has been sent."""
        writer = work.dialect.writer(work.head)
        async with aclosing(work.events) as events:
            try:
                async for event in events:
                    work.outcome.note(event)
                    if exchange is not None:
                        await exchange.objects(chunks(item, written(writer, event)))
                completions = work.outcome.in_order
                if exchange is None:
                    return None, writer.whole(completions)
                await exchange.objects(chunks(item, writer.end(completions)))
                return None, None
            except Cancelled:  # the caller reads nothing
                raise
            except Exception as error:  # noqa: BLE001 - whatever failed, the caller gets its message, and the other items go on
                work.outcome.error = problem = problem_of_any(error)
                return problem, None
            finally:
                self._close(item.index)


def chunks(item: RequestedItem, objects: Iterable[Written]) -> Iterator[Written]:
    """The objects of one request's stream as those of a stream of several: each names its request."""
    return (ParallelChunk(item.index, item.id, body).to_json() for body in objects)


def _figures(results: Sequence[ParallelResult]) -> ParallelFigures:
    return ParallelFigures.of([result.seconds for result in results if result.status == HTTPStatus.OK])


async def _all(works: Iterable[Coroutine[Any, Any, ParallelResult]]) -> Sequence[ParallelResult]:
    """The results of all, which run at the same time. If one is cancelled or raises, all end."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as raised:
        raise raised.exceptions[0] from None
    return [task.result() for task in tasks]
