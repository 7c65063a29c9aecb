"""Runs one request: its answers come from AsyncClient, all at the same time, and leave as one sequence of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial

from disagg.errors import ServerUnavailable, Unauthorized
from disagg.gateway.events import Event, Finished, Piece
from disagg.gateway.observe.observers import Life
from disagg.gateway.request import GatewayRequest
from disagg.inference.client import AsyncClient
from disagg.inference.stream import AsyncStream
from disagg.inference.types import Stage

Staged = Callable[[int, Stage], None]

MAX_ID = 47  # of the 64 characters of an id on a host: an attempt's own id follows
WAITING_EVENTS = 64  # of several answers together; the streams hold what does not fit


async def run(
    client: AsyncClient, request: GatewayRequest, life: Life, staged: Staged, request_id: str = ""
) -> AsyncGenerator[Event, None]:
    """The events of all answers. Raises a DisaggError if one fails; closing the generator cancels all.

    life: is told what happens, and has recorded each answer before its end is yielded. staged: is called with the
    number of an answer whenever that comes to another stage. request_id: its ids in the hosts' logs begin with it.
    """

    def watch(choice: int, stage: Stage) -> None:
        life.moved(choice, stage)
        staged(choice, stage)

    try:
        async with AsyncExitStack() as stack:
            streams = []
            for choice in range(request.choices):
                stream = client.stream(
                    **request.arguments(choice), watch=partial(watch, choice), request_id=request_id[:MAX_ID]
                )
                streams.append(await stack.enter_async_context(stream))
            async with aclosing(
                _answer(0, streams[0], life) if len(streams) == 1 else _together(streams, life)
            ) as events:
                async for event in events:
                    yield event
    except Unauthorized as error:  # the gateway's own token is meant, not the caller's key
        raise ServerUnavailable(error.message, error.hint) from error


async def _answer(choice: int, stream: AsyncStream, life: Life) -> AsyncGenerator[Event, None]:
    async for chunk in stream:
        if not chunk.note:  # notes are among the completion's warnings, too
            life.generated(choice, len(chunk.tokens))
            yield Piece(choice, chunk.text, chunk.tokens, chunk.reasoning, chunk.tool_calls)
    life.completed(choice, stream.completion)
    await life.settle()
    yield Finished(choice, stream.completion)


async def _together(streams: Sequence[AsyncStream], life: Life) -> AsyncGenerator[Event, None]:
    """The events of several answers in the order of their arrival."""
    queue: asyncio.Queue[Event | Exception] = asyncio.Queue(WAITING_EVENTS)

    async def read(events: AsyncIterator[Event]) -> None:
        try:
            async for event in events:
                await queue.put(event)
        except Exception as error:  # noqa: BLE001 - whatever failed, it is raised below: nobody may wait for the answer
            await queue.put(error)

    tasks = [asyncio.ensure_future(read(_answer(choice, stream, life))) for choice, stream in enumerate(streams)]
    running = len(tasks)
    try:
        while running:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            running -= isinstance(event, Finished)
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
