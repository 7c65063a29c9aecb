"""GET /api/live: the state of the fleet as server-sent events, for all who watch."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg.api.gateway.live import LiveHost, Past
from disagg.errors import Overloaded
from disagg.gateway.live.board import SAMPLE_S, Board
from disagg.http.requests import disconnected

BUSY_S: Final = 0.5  # between two events while requests run
IDLE_S: Final = 1.0
STALL_S: Final = 20.0  # a watcher that reads nothing for this long is disconnected
MAX_WATCHERS: Final = 64
MAX_WATCHERS_OF_KEY: Final = 16

Visible = frozenset[str] | None
"""The models that a watcher may see; None: all."""


class Feed:
    """What all watchers of one gateway get. hosts: as they are now."""

    def __init__(self, board: Board, hosts: Callable[[], Sequence[LiveHost]]) -> None:
        self._board, self._hosts = board, hosts
        self._stopping = asyncio.Event()
        self._watchers: Counter[str | None] = Counter()  # by key
        self._cached: dict[Visible, tuple[float, bytes]] = {}

    async def sample(self) -> None:
        """Add points to the plots until `stop`."""
        while not await self._stopped_within(SAMPLE_S):
            self._board.sample(self._hosts(), time.monotonic())

    def stop(self) -> None:
        """End all streams."""
        self._stopping.set()

    @property
    def watchers(self) -> int:
        """How many watch now."""
        return self._watchers.total()

    def watch(self, visible: Visible, key: str | None = None, allowed: Callable[[], bool] = lambda: True) -> Response:
        """The answer to GET /api/live. key: of the watcher. It ends once it is not `allowed`. Raises Overloaded
        if too many watch."""
        if self.watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} programs already watch this gateway", "close one of them")
        if key is not None and self._watchers[key] >= MAX_WATCHERS_OF_KEY:
            raise Overloaded(f"{MAX_WATCHERS_OF_KEY} programs already watch with this key", "close one of them")
        return _Stream(self, visible, key, allowed)

    def state(self, visible: Visible) -> bytes:
        """The event `state` of this moment. Watchers that see the same share it."""
        now = time.monotonic()
        made, event = self._cached.get(visible, (0.0, b""))
        if now - made >= BUSY_S / 2:
            event = _event("state", self._board.state(self._hosts(), now, visible).to_bytes())
            self._cached = {key: value for key, value in self._cached.items() if now - value[0] < IDLE_S}
            self._cached[visible] = (now, event)
        return event

    async def send(self, visible: Visible, key: str | None, allowed: Callable[[], bool], send: Send) -> None:
        """Events until `stop`, or as long as it is allowed: `past` once, then `state` again and again."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        self._watchers[key] += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _send(send, _event("past", Past(self._board.past(visible)).to_bytes()))
            while allowed():
                await _send(send, self.state(visible))
                if await self._stopped_within(BUSY_S if self._board.busy else IDLE_S):
                    break
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._watchers[key] -= 1
            self._watchers += Counter()  # keeps no zeros

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._stopping.wait()
        except TimeoutError:
            return False


class _Stream(Response):
    def __init__(self, feed: Feed, visible: Visible, key: str | None, allowed: Callable[[], bool]) -> None:
        super().__init__()
        self._feed, self._visible, self._key, self._allowed = feed, visible, key, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = (
            asyncio.ensure_future(self._feed.send(self._visible, self._key, self._allowed, send)),
            asyncio.ensure_future(disconnected(receive)),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # a watcher that has gone, or reads nothing, is nobody's error


async def _send(send: Send, event: bytes) -> None:
    async with asyncio.timeout(STALL_S):
        await send({"type": "http.response.body", "body": event, "more_body": True})


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
