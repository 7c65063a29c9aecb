"""A clock that jumps over waits."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

ARRIVAL_S = 0.005  # what one socket of this process has sent, another has received after this


class _JumpingSelector:
    """A selector that gives what is ready, and otherwise moves the clock on instead of waiting."""

    def __init__(self, selector: selectors.BaseSelector, offset: list[float]) -> None:
        self._selector, self._offset = selector, offset

    def select(self, timeout: float | None = None) -> Any:
        ready = self._selector.select(timeout if timeout is None else min(timeout, ARRIVAL_S))
        if not ready and timeout is not None:
            self._offset[0] += max(0.0, timeout - ARRIVAL_S)
        return ready

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)


@pytest.fixture
async def virtual_time(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[float], None]]:
    """time.monotonic() jumps to the next timer of the event loop whenever nothing else is left to do. Gives a function
    that lets so many seconds pass, as if this process had been stopped.

    Only for tests whose hosts are on the same event loop, as those of tests.inference.scripted are.
    """
    offset, real = [0.0], time.monotonic
    loop: Any = asyncio.get_running_loop()
    monkeypatch.setattr(time, "monotonic", lambda: real() + offset[0])
    monkeypatch.setattr(loop, "_selector", _JumpingSelector(loop._selector, offset))

    def stopped_for(seconds: float) -> None:
        offset[0] += seconds

    yield stopped_for
