"""From an engine's tokens to the events of one answer.

``tokens`` {"text", "tokens": [{"id", "logprob", "top"}]} once per decode step, or for several that came together, then
``done`` or ``error``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from disagg.engines.base import DecodeTiming, Token
from disagg.engines.model.text import TextStream
from disagg.errors import DeadlineExceeded, DisaggError
from disagg.servers import logs
from disagg.servers.sse import Event

T = TypeVar("T")
Step = tuple[Sequence[Token], DecodeTiming, float]
"""The tokens of one decode step, the request's timing, and time.monotonic() when the engine had them."""


async def within(work: Awaitable[T], deadline: float, otherwise: str) -> T:
    """Await until `deadline` on time.monotonic(); DeadlineExceeded says what had not happened by then."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(f"{otherwise} by the request's deadline", "raise the timeout") from None


@dataclass(slots=True)
class Answer:
    """One answer as it grows."""

    text: TextStream
    completion_tokens: int = 0
    finish_reason: str = ""
    timing: DecodeTiming | None = None
    first_at: float = 0.0
    last_at: float = 0.0

    async def events(self, steps: AsyncGenerator[Sequence[Step], None]) -> AsyncGenerator[Event, None]:
        """The ``tokens`` events of these steps, one for those that came together, until the last token or a stop
        string."""
        async with aclosing(steps):
            async for came in steps:
                yield "tokens", self._event(came)
                if self.finish_reason:
                    return

    def done(self, prompt_tokens: int, timing: Mapping[str, float], computed: int, **extra: Any) -> Event:
        """The closing event. `timing`: seconds on this host's clock; `computed`: prompt tokens this host ran."""
        return "done", {
            "finish_reason": self.finish_reason,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "computed_prompt_tokens": computed,
            "timing": {**timing, "decode_s": self.last_at - self.first_at},
            **extra,
        }

    def _event(self, came: Sequence[Step]) -> dict[str, object]:
        pieces: list[str] = []
        sent: list[dict[str, object]] = []
        for tokens, self.timing, self.last_at in came:
            self.first_at = self.first_at or self.last_at
            for token in tokens:
                self._take(token, pieces, sent)
                if self.finish_reason:
                    return {"text": "".join(pieces), "tokens": sent}
        return {"text": "".join(pieces), "tokens": sent}

    def _take(self, token: Token, pieces: list[str], sent: list[dict[str, object]]) -> None:
        self.completion_tokens += 1
        sent.append({"id": token.id, "logprob": token.logprob, "top": token.top})
        pieces.append(self.text.push(token.id))
        if not self.text.stopped and token.finish:
            pieces.append(self.text.finish())
            self.finish_reason = token.finish
        if self.text.stopped:
            self.finish_reason = "stop"


async def with_errors(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """The same events; a failure becomes a closing ``error`` event, since the HTTP status has gone out."""
    try:
        async for event in events:
            yield event
    except DisaggError as error:
        yield "error", error.to_json()
    except Exception as error:  # noqa: BLE001 - whatever a bug raises, the caller must hear of it, and the log
        logs.log.error("internal_error", exc_info=error)
        yield "error", DisaggError("internal error in the server", "its log has the traceback").to_json()
    finally:
        await events.aclose()
