"""A clock that jumps over waits."""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test runs on asyncio's own event loop and on uvloop, which many web servers use. But for those that are on
    asyncio's alone by what they are: `virtual_time` replaces its selector."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.SelectorEventLoop}
    if "virtual_time" not in getattr(item, "fixturenames", ()):
        loops["uvloop"] = _uvloop
    return loops


def _uvloop() -> asyncio.AbstractEventLoop:
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


ARRIVAL_S = 0.005  # how long a thread or a program is waited for; bytes between sockets of this process need no guess
JUST_AFTER_S = 1e-6  # a sum of floats may lie just before the timer that it is to reach


class _JumpingSelector:
    """A selector that gives what is ready, and otherwise moves the clock on instead of waiting."""

    def __init__(self, selector: selectors.BaseSelector, now: list[float]) -> None:
        self._selector, self._now = selector, now
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._near = socket.create_connection(listener.getsockname())
            self._far, _ = listener.accept()

    def select(self, timeout: float | None = None) -> Any:
        ready = self._selector.select(timeout if timeout is None else min(timeout, ARRIVAL_S))
        if not ready and timeout:
            self._let_bytes_arrive()
            ready = self._selector.select(0)
            if not ready:
                self._now[0] += timeout + JUST_AFTER_S
        return ready

    def _let_bytes_arrive(self) -> None:
        """The loopback device delivers in the order of sending: once these have come, so have all before them."""
        for _ in range(3):
            for sender, receiver in ((self._near, self._far), (self._far, self._near)):
                sender.send(b".")
                receiver.recv(1)

    def close_sockets(self) -> None:
        self._near.close()
        self._far.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._selector, name)


@pytest.fixture
async def virtual_time(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[float], None]]:
    """time.monotonic() stands still, and jumps to the next timer of the event loop whenever nothing else is left to
    do: how long this machine computes does not count. Gives a function that lets so many seconds pass, as if this
    process had been stopped.

    Only for tests whose hosts are on the same event loop, as those of tests.inference.scripted are.
    """
    now = [time.monotonic()]
    loop: Any = asyncio.get_running_loop()
    selector = _JumpingSelector(loop._selector, now)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(loop, "_selector", selector)

    def stopped_for(seconds: float) -> None:
        now[0] += seconds

    yield stopped_for
    selector.close_sockets()
