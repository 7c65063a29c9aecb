"""GET /api/live: the state of the fleet as server-sent events, for all who watch."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from disagg import logs
from disagg.api.gateway import LiveHost, Past
from disagg.errors import Cancelled, Overloaded
from disagg.gateway.watch.board import SAMPLE_S, Board
from disagg.http.stream import EVENT_STREAM, BodyParts, event_bytes, unless_disconnected

STALL_S: Final = 20.0  # a watcher that reads nothing for this long is disconnected

Visible = frozenset[str] | None
"""The models that a watcher may see; None: all."""


@dataclass(frozen=True, slots=True)
class FeedBounds:
    """busy_s, idle_s: between two events while requests run, and else. watchers: of all keys together."""

    busy_s: float = 0.5
    idle_s: float = 1.0
    watchers: int = 64
    watchers_of_key: int = 16


class Feed:
    """What all watchers of one gateway get. hosts: as they are now."""

    def __init__(
        self,
        board: Board,
        hosts: Callable[[], Sequence[LiveHost]],
        bounds: FeedBounds = FeedBounds(),
    ) -> None:
        self._board, self._hosts, self._bounds = board, hosts, bounds
        self._stopping = asyncio.Event()
        self._watchers: Counter[str | None] = Counter()  # by key
        self._cached: dict[tuple[Visible, str | None], tuple[float, bytes]] = {}

    async def sample(self) -> None:
        """Add points to the plots until `stop`, and log what the log has left out."""
        while not await self._stopped_within(SAMPLE_S):
            self._board.sample(self._hosts(), time.monotonic())
            logs.summarise()

    def stop(self) -> None:
        """End all streams."""
        self._stopping.set()

    @property
    def watchers(self) -> int:
        """How many watch now."""
        return self._watchers.total()

    def watch(
        self,
        visible: Visible,
        key: str | None = None,
        allowed: Callable[[], bool] = lambda: True,
        *,
        own: bool = False,
    ) -> Response:
        """The answer to GET /api/live. key: of the watcher; own: it sees the requests of this key only. It ends once it
        is not `allowed`. Raises Overloaded if too many watch."""
        bounds = self._bounds
        if self.watchers >= bounds.watchers:
            raise Overloaded(f"{bounds.watchers} programs already watch this gateway", "close one of them")
        if key is not None and self._watchers[key] >= bounds.watchers_of_key:
            raise Overloaded(f"{bounds.watchers_of_key} programs already watch with this key", "close one of them")
        return _Stream(partial(self._send, visible, key, key if own else None, allowed))

    def state(self, visible: Visible, own: str | None = None) -> bytes:
        """The event `state` of this moment. Watchers that see the same share it. own: the key whose requests it has;
        None: it has those of all."""
        now = time.monotonic()
        made, event = self._cached.get((visible, own), (0.0, b""))
        if now - made >= self._bounds.busy_s / 2:
            event = event_bytes(self._seen(own).state(self._hosts(), now, visible).to_bytes(), "state")
            self._cached = {key: value for key, value in self._cached.items() if now - value[0] < self._bounds.idle_s}
            self._cached[visible, own] = (now, event)
        return event

    def _seen(self, own: str | None) -> Board:
        return self._board if own is None else self._board.own(own)

    async def _send(
        self, visible: Visible, key: str | None, own: str | None, allowed: Callable[[], bool], parts: BodyParts
    ) -> None:
        """Events until `stop`, or as long as it is allowed: `past` once, then `state` again and again."""
        self._watchers[key] += 1
        try:
            await parts.part(event_bytes(Past(self._seen(own).past(visible)).to_bytes(), "past"))
            while allowed():
                await parts.part(self.state(visible, own))
                if await self._stopped_within(self._bounds.busy_s if self._seen(own).busy else self._bounds.idle_s):
                    break
            await parts.end()
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
    def __init__(self, send: Callable[[BodyParts], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._send = send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = self._send(BodyParts(scope, send, EVENT_STREAM, STALL_S))
        with suppress(Cancelled):
            await unless_disconnected(sending, receive, "the live view")
