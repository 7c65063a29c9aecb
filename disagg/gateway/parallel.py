"""POST /v1/parallel: several requests in one body, which run at the same time and are answered together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.api.base import InvalidValue
from disagg.api.gateway import (
    MAX_NAME,
    ParallelAnswer,
    ParallelBody,
    ParallelChunk,
    ParallelEnd,
    ParallelFigures,
    ParallelResult,
)
from disagg.errors import DisaggError, RequestError
from disagg.gateway.answer import STOPPED, AcceptedRequest, Exchange, ResponseTimes, json_response, problem_response
from disagg.gateway.dialects.base import DATA_EVENTS, Dialect, GatewayRequest, Written
from disagg.gateway.dialects.chat import ChatCompletions
from disagg.gateway.dialects.completions import Completions
from disagg.gateway.dialects.problems import Problem

CHAT: Final = ChatCompletions()
COMPLETION: Final = Completions()
_MAX_ID: Final = 64  # characters of a request's id


def read(
    body: Mapping[str, Any], named: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> tuple[Sequence[RequestedItem], bool]:
    """The items of a body, and whether their answers are a stream. named: a body with the model of one that names none.
    Raises RequestError if it is no such body, two items have the same id, or no item can be read."""
    try:
        fields = ParallelBody.from_json(body)
    except InvalidValue as error:
        raise RequestError(str(error)) from None
    stream = bool(fields.stream)
    items = [_item(index, named(given), stream) for index, given in enumerate(fields.requests)]
    names = [item.id for item in items if item.id is not None]
    if len(set(names)) < len(names):
        raise RequestError("requests: two of them have the same id", "give each its own, or none")
    first = items[0].request
    if isinstance(first, DisaggError) and all(isinstance(item.request, DisaggError) for item in items):
        raise type(first)(f"requests[0].{first.message}", first.hint)
    return items, stream


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
    fields = {key: value for key, value in given.items() if key != "id"} | {"stream": stream}
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
    work: AcceptedRequest | Problem


class ParallelResponse(Response):
    """The response to one body."""

    def __init__(
        self, parts: Sequence[ItemRun], request_id: str, created: float, times: ResponseTimes, *, stream: bool
    ) -> None:
        super().__init__()
        self._parts, self._times = parts, times
        self._id, self._created = f"parallel-{request_id}", int(created)
        self._stream = stream
        self._began = time.monotonic()  # all items were sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, send, DATA_EVENTS, self._times, stream=self._stream)
        refusal = problem_response(CHAT, STOPPED)
        await exchange.perform(self._perform(exchange), receive, (CHAT.error(STOPPED),), refusal, self._ended)

    def _ended(self) -> None:
        """Report the end of the requests that were cancelled before they began to run."""
        for part in self._parts:
            if isinstance(part.work, AcceptedRequest):
                part.work.ended()

    async def _perform(self, exchange: Exchange) -> None:
        async def one(part: ItemRun) -> ParallelResult:
            result = await self._item(part, exchange)
            if exchange.stream:
                await exchange.objects((result.to_json(),))
            return result

        results = await _all(one(part) for part in self._parts)
        figures = ParallelFigures.of([one.seconds for one in results if one.status == HTTPStatus.OK])
        if exchange.stream:
            await exchange.complete((ParallelEnd(figures).to_json(),))
        else:
            answer = ParallelAnswer(self._id, "parallel", self._created, tuple(results), figures)
            await exchange.respond(json_response(answer.to_json()))

    async def _item(self, part: ItemRun, exchange: Exchange) -> ParallelResult:
        """Run one item to its end. The chunks of its stream are sent; if it has none, its result has the answer."""
        item, ending = part.item, await self._ending(part, exchange)
        seconds = time.monotonic() - self._began
        if isinstance(ending, Problem):
            return ParallelResult(item.index, item.id, ending.status, seconds, item.dialect.error(ending))
        body = UNSET if exchange.stream else ending[0]
        return ParallelResult(item.index, item.id, HTTPStatus.OK, seconds, body)

    async def _ending(self, part: ItemRun, exchange: Exchange) -> Problem | Sequence[Written]:
        if isinstance(work := part.work, Problem):
            return work

        async def chunks(objects: Iterable[Written]) -> None:
            named = (ParallelChunk(part.item.index, part.item.id, body).to_json() for body in objects)
            await exchange.objects(named)

        problem: Problem | None = None
        try:
            ending = await work.perform(chunks if exchange.stream else None)
            if isinstance(ending, Problem):
                problem = ending
            elif exchange.stream:
                await chunks(ending)
            return ending
        finally:
            work.ended(problem)


async def _all(works: Iterable[Coroutine[Any, Any, ParallelResult]]) -> Sequence[ParallelResult]:
    """The results of all, which run at the same time. If one is cancelled or raises, all end."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as raised:
        raise raised.exceptions[0] from None
    return [task.result() for task in tasks]
