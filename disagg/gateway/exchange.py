"""One response on its way to a caller that may disconnect, or read nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.errors import Cancelled
from disagg.gateway.dialects.base import Framing, Written
from disagg.gateway.dialects.problems import Problem
from disagg.http.requests import disconnected
from disagg.http.stream import BodyParts, running

FIRST_S = 2.0  # without an event, the response starts with a comment; until then an error has its HTTP status
KEEP_ALIVE_S = 10.0  # between two comments
STALL_S = 60.0  # a caller that reads nothing for this long counts as disconnected
STOPPED = Problem(503, "server_error", "gateway_stopped", "the gateway is stopping; the answer is not complete")


class Exchange(BodyParts):
    """Sends one response: objects, framed as a stream of this kind. stream: False if it is sent whole, by `send`."""

    def __init__(self, scope: Scope, send: Send, framing: Framing, *, stream: bool) -> None:
        super().__init__(scope, send, framing.media_type, STALL_S)
        self._framing = framing
        self._comment = framing.keep_alive if stream else b""

    async def objects(self, objects: Iterable[Written]) -> None:
        """Send these objects. Raises Cancelled if the caller stalls."""
        await self.part(self._framing.join(objects))

    async def complete(self, objects: Iterable[Written]) -> None:
        """Send the last objects of a complete stream."""
        await self.end(self._framing.join(objects) + self._framing.done)

    async def cut(self, objects: Iterable[Written]) -> None:
        """Send the last objects of a stream that is not complete."""
        await self.end(self._framing.join(objects))

    async def perform(
        self,
        work: Coroutine[Any, Any, None],
        receive: Receive,
        cut: Iterable[Written],
        refusal: Response,
        ended: Callable[[bool], None],
    ) -> None:
        """Run `work`, which sends the response, until it ends or the caller disconnects.

        If the gateway's stop cuts it, `cut` are the last objects of a stream that has begun, and `refusal` is sent
        instead of a response that has not. ended: is called once; whether it was cancelled.
        """
        others = [disconnected(receive)]
        if self._comment:
            others.append(self.keep_alive(lambda: self._comment, FIRST_S, KEEP_ALIVE_S))
        cancelled = True
        try:
            async with running(work, *others) as tasks:
                writing = tasks[0]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:  # the gateway stops and does not wait any longer
                    writing.cancel()
                    with suppress(Exception):
                        await (self.cut(cut) if self.started else refusal({"type": "http"}, receive, self.send))
        finally:
            # A stop that is pressed leaves no time for the task to end.
            cancelled = not writing.done() or writing.cancelled() or isinstance(writing.exception(), Cancelled)
            ended(cancelled)
        if not cancelled:
            writing.result()
