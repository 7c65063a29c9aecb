"""From an engine's tokens to the events of one answer.

Events: ``tokens`` {"text", "tokens": [{"id", "logprob", "top"}]} once per decode step, then one ``done`` or ``error``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from disagg.engines.base import DecodeTiming, Token
from disagg.engines.text import TextStream
from disagg.servers.sse import Event

Step = tuple[Sequence[Token], DecodeTiming]


class TokenFeed:
    """An engine Listener that hands each step to the event loop.

    The queue between them holds at most one entry per token of the request, and so is bounded by max_tokens.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Step | Exception] = asyncio.Queue()

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (tokens, timing))

    def on_error(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, error)

    async def steps(self) -> AsyncIterator[Step]:
        """Every step until the last token; raises the engine's error."""
        while True:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item[0][-1].finish:
                return


@dataclass(slots=True)
class Answer:
    """One answer as it grows."""

    text: TextStream
    completion_tokens: int = 0
    finish_reason: str | None = None
    timing: DecodeTiming | None = None

    async def events(self, steps: AsyncIterator[Step]) -> AsyncGenerator[Event, None]:
        """The ``tokens`` events of these steps, until the last token or a stop string."""
        async for tokens, timing in steps:
            self.timing = timing
            yield "tokens", self._event(tokens)
            if self.finish_reason:
                return

    def _event(self, tokens: Sequence[Token]) -> dict[str, object]:
        pieces, sent = [], []
        for token in tokens:
            self.completion_tokens += 1
            sent.append({"id": token.id, "logprob": token.logprob, "top": token.top})
            pieces.append(self.text.push(token.id))
            if self.text.stopped:
                self.finish_reason = "stop"
                break
            if token.finish:
                pieces.append(self.text.finish())
                # A stop string may complete in the text that was held back.
                self.finish_reason = "stop" if self.text.stopped else token.finish
        return {"text": "".join(pieces), "tokens": sent}


def feed_from(tokens: Iterator[Token], feed: TokenFeed, timing: DecodeTiming, now: Callable[[], float]) -> None:
    """Drain an engine's own generator into a feed, on the engine's thread."""
    for token in tokens:
        if not timing.first_token:
            timing.first_token = now()
        if token.finish:
            timing.finished = now()
        feed.on_tokens((token,), timing)
