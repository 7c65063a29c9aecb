"""Waits of a request for a host that is busy or not up: stated on the stream, bounded, and not all at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.errors import DisaggError
from disagg.inference.attempts.retry import Pause
from disagg.inference.policy import Timeouts

LONGEST_DELAY_S = 5.0


@dataclass(slots=True)
class RetryBudget:
    """Spreads the retries of one client: `per_s` a second. There are more only if a request would else be delayed by
    over LONGEST_DELAY_S. Pure but for its own count."""

    per_s: float
    _next: float = 0.0

    def delay(self, now: float) -> float:
        """Seconds to wait in addition, so that the budget is kept; counts this retry."""
        at = min(max(now, self._next), now + LONGEST_DELAY_S)
        self._next = at + 1 / self.per_s
        return at - now


@dataclass(slots=True)
class Waiting:
    """One request's waits; each reason is noted once. closed, woken: end them. error: to raise if its deadline passes
    meanwhile; None while it does not wait."""

    timeouts: Timeouts
    note: Callable[[str], None]
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    error: DisaggError | None = None
    _limited: bool = False
    _began: float = 0.0
    _ended: float = 0.0
    _noted: set[str] = field(default_factory=set)

    async def wait(self, pause: Pause, seconds: float) -> bool:
        """Wait `seconds`, or until the client is closed or `woken` is set. False, at once, if no host has been up for
        too long."""
        now = time.monotonic()
        if pause.limited != self._limited or now - self._ended > self.timeouts.note:  # another wait begins
            self._limited, self._began = pause.limited, now
        if pause.limited and now - self._began >= self.timeouts.none_up:
            return False
        self.error = pause.error
        if now + seconds >= (stated_at := self._began + self.timeouts.note):
            await self._sleep_until(stated_at)
            if not self.woken.is_set():
                self._state(pause)
        await self._sleep_until(now + seconds)
        self.woken.clear()
        self._ended = time.monotonic()
        self.error = None
        return True

    async def _sleep_until(self, ends: float) -> None:
        woken = [asyncio.ensure_future(event.wait()) for event in (self.closed, self.woken)]
        try:
            while (seconds := ends - time.monotonic()) > 0:  # uvloop's timers end up to a millisecond early
                done, _ = await asyncio.wait(woken, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return
        finally:
            for event in woken:
                event.cancel()

    def _state(self, pause: Pause) -> None:
        if pause.reason not in self._noted:
            self._noted.add(pause.reason)
            self.note(f"waiting: {pause.reason}" + (f": {pause.detail}" if pause.detail else ""))
