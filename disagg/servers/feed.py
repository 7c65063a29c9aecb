"""Tokens on their way from an engine's thread to the event loop: one wake-up per decode step, for all its requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from disagg.engines.base import DecodeTiming, Token
from disagg.errors import DeadlineExceeded
from disagg.servers.answer import Step


class Handover:
    """What an engine's thread has said and the event loop has not heard yet. Made on the event loop.

    Holds at most one entry per token of the requests that run, and so is bounded by their max_tokens.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._said: deque[tuple[TokenFeed, Step | Exception]] = deque()
        self._waking = False

    def put(self, feed: TokenFeed, said: Step | Exception) -> None:
        """Leave something for `feed`; the event loop hears of it at the next flush."""
        self._said.append((feed, said))

    def flush(self) -> None:
        """Wake the event loop, unless it is waking already. On any thread, after every step."""
        if self._said and not self._waking:
            self._waking = True
            self._loop.call_soon_threadsafe(self._spread)

    def _spread(self) -> None:
        self._waking = False  # first: whatever is put after the last look below wakes the loop anew
        while self._said:
            feed, said = self._said.popleft()
            feed.hear(said)


class TokenFeed:
    """An engine Listener that hands the steps of one request to the event loop, through `handover`."""

    def __init__(self, handover: Handover) -> None:
        self._handover = handover
        self._steps: list[Step] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        """Heard at the next flush."""
        self._handover.put(self, (tokens, timing, time.monotonic()))

    def on_error(self, error: Exception) -> None:
        """Heard at once."""
        self._handover.put(self, error)
        self.flush()

    def flush(self) -> None:
        """Let what was said be heard, where no engine does that after each step."""
        self._handover.flush()

    def hear(self, said: Step | Exception) -> None:
        """On the event loop."""
        if isinstance(said, Exception):
            self._error = said
        else:
            self._steps.append(said)
        self._news.set()

    async def steps(self, deadline: float) -> AsyncGenerator[Sequence[Step], None]:
        """All steps that have come since the last look, until the last token; raises the engine's error, or
        DeadlineExceeded (time.monotonic())."""
        late = DeadlineExceeded("the answer was not complete by the request's deadline", "raise the timeout")
        timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), self.hear, late)
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                came, self._steps = self._steps, []
                if came:
                    yield came
                    if came[-1][0][-1].finish:
                        return
                if self._error is not None:
                    raise self._error
        finally:
            timer.cancel()
