"""One response on its way to a caller that may disconnect, or read nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from starlette.types import Receive, Send

from disagg.errors import Cancelled
from disagg.gateway.dialects.problems import Problem
from disagg.http.requests import disconnected

FIRST_S = 2.0  # without an event, the response starts with a comment; until then an error has its HTTP status
KEEP_ALIVE_S = 10.0  # between two comments
STALL_S = 60.0  # a caller that reads nothing for this long counts as disconnected
STOPPED = Problem(503, "server_error", "gateway_stopped", "the gateway is stopping; the answer is not complete")


class Exchange:
    """Sends one response. keep_alive: sent while there is nothing else to send; empty if nothing is.

    started: its status has been sent. send: for a response that is not sent by `part`.
    """

    def __init__(self, send: Send, media_type: str, keep_alive: bytes = b"") -> None:
        self.send = send
        self.started = False
        self._media_type = media_type
        self._keep_alive = keep_alive
        self._over = False
        self._quiet = True
        self._sending = asyncio.Lock()

    async def perform(
        self,
        work: Coroutine[Any, Any, None],
        receive: Receive,
        cut: Callable[[], bytes],
        ended: Callable[[bool], None],
    ) -> None:
        """Run `work`, which sends the response, until it ends or the caller disconnects.

        cut: the last part of a stream that the gateway's stop cuts. ended: is called once; whether it was cancelled.
        """
        writing = asyncio.ensure_future(work)
        others = [asyncio.ensure_future(disconnected(receive))]
        if self._keep_alive:
            others.append(asyncio.ensure_future(self._comment()))
        cancelled = True
        try:
            await asyncio.wait((writing, *others), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the gateway stops and does not wait any longer
            await self._cut(writing, cut)
            raise
        finally:
            for task in (writing, *others):
                task.cancel()
            await asyncio.wait((writing, *others))
            cancelled = writing.cancelled() or isinstance(writing.exception(), Cancelled)
            ended(cancelled)
        if not cancelled:
            writing.result()

    async def part(self, data: bytes, *, more: bool = True) -> None:
        """Send one part of a stream, after its head. Raises Cancelled if the caller does not read it."""
        if not data and more:
            return
        self._quiet = False
        try:
            async with asyncio.timeout(STALL_S), self._sending:
                if self._over:  # a comment that waited for the end to be sent
                    return
                if not self.started:
                    self.started = True
                    headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-store")]
                    await self.send({"type": "http.response.start", "status": 200, "headers": headers})
                self._over = not more
                await self.send(_body(data, more=more))
        except TimeoutError:
            raise Cancelled(f"the caller read nothing for {STALL_S:g} s") from None

    async def _comment(self) -> None:
        await asyncio.sleep(FIRST_S)
        while True:
            if self._quiet:
                await self.part(self._keep_alive)
            self._quiet = True
            await asyncio.sleep(KEEP_ALIVE_S)

    async def _cut(self, writing: asyncio.Task[None], cut: Callable[[], bytes]) -> None:
        """Tell the caller that the answer is not complete."""
        writing.cancel()
        if self.started:
            with suppress(Exception):
                await self.send(_body(cut(), more=False))


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
