"""Tokens on their way from an engine's thread to the event loop: one wake-up per decode step, for all its requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from disagg.engines.base import DecodeTiming, Token
from disagg.errors import DeadlineExceeded


class StepTokens(NamedTuple):
    """The tokens of one decode step, the request's timing, and time.monotonic() when the engine had them."""

    tokens: Sequence[Token]
    timing: DecodeTiming
    at: float


Take = Callable[[Sequence[StepTokens]], bool]
"""Takes steps as they arrive, on the event loop and without a wait: a token then wakes no task. False if it cannot now;
they then wait for `TokenFeed.steps`. What it raises, `steps` raises."""


class TokenBridge:
    """What an engine's thread has queued for the event loop. Create it on the event loop.

    Holds at most one entry per token of the running requests, and so is bounded by their max_tokens.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[TokenFeed, StepTokens | Exception]] = deque()
        self._waking = False

    def put(self, feed: TokenFeed, item: StepTokens | Exception) -> None:
        """Queue an item for `feed`, which receives it at the next flush."""
        self._queue.append((feed, item))

    def flush(self) -> None:
        """Wake the event loop, unless it is waking already. On any thread, after every step."""
        if self._queue and not self._waking:
            self._waking = True
            self._loop.call_soon_threadsafe(self._distribute)

    def _distribute(self) -> None:
        self._waking = False  # first: an item that is put after the loop below has ended wakes the event loop again
        feeds: dict[TokenFeed, None] = {}
        while self._queue:
            feed, item = self._queue.popleft()
            feed.receive(item)
            feeds[feed] = None
        for feed in feeds:
            feed.pass_on()


class TokenFeed:
    """An engine Listener that passes the steps of one request to the event loop, through `bridge`.

    Create it on the event loop. `deadline`: time.monotonic(), after which `steps` raises DeadlineExceeded. take: has
    the steps first, once it is set.
    """

    def __init__(self, bridge: TokenBridge, deadline: float) -> None:
        self.take: Take = _nobody
        self._bridge = bridge
        self._steps: list[StepTokens] = []
        self._error: Exception | None = None
        self._received = asyncio.Event()
        late = DeadlineExceeded("the answer was not complete by the request's deadline", "raise the timeout")
        self._timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), self._fail, late)

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        """The event loop receives the tokens at the next flush."""
        self._bridge.put(self, StepTokens(tokens, timing, time.monotonic()))

    def on_error(self, error: Exception) -> None:
        """The event loop receives the error at once."""
        self._bridge.put(self, error)
        self.flush()

    def flush(self) -> None:
        """Flush the bridge, for an engine that does not do so after each step."""
        self._bridge.flush()

    def receive(self, item: StepTokens | Exception) -> None:
        """Take what has come from the engine, on the event loop. Nothing is taken after an error: a slow reader must
        not outlast the deadline."""
        if isinstance(item, Exception):
            self._fail(item)
        elif self._error is None:
            self._steps.append(item)

    def pass_on(self) -> None:
        """Let what was received be taken, or wake who waits for it."""
        if self._steps:
            try:
                if self.take(self._steps):
                    self._steps = []
                    return
            except Exception as error:  # noqa: BLE001 - `steps` raises it
                self._steps = []
                self._fail(error)
        self.wake()

    def wake(self) -> None:
        """Let `steps` return, also without any."""
        self._received.set()

    async def steps(self) -> Sequence[StepTokens]:
        """All steps since the last call that were not taken; none after `wake`. Raises the engine's error after the
        steps before it."""
        if not self._steps:
            if self._error is None:
                await self._received.wait()
            if self._error is not None and not self._steps:
                raise self._error
        self._received.clear()
        steps, self._steps = self._steps, []
        return steps

    def close(self) -> None:
        """Stop the deadline's timer."""
        self._timer.cancel()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self.wake()


def _nobody(_: Sequence[StepTokens]) -> bool:
    return False
