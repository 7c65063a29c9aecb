"""Interrupt the waits of other threads: every wait on a machine checks here, and raises Cancelled once interrupted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

from disagg.errors import Cancelled

_stop: ContextVar[Event | None] = ContextVar("stop", default=None)

POLL_S = 0.2
"""The longest that a wait may last between two checks."""


@contextmanager
def interrupted_by(stop: Event) -> Iterator[None]:
    """Within, waits of this thread raise Cancelled once `stop` is set."""
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


def check() -> None:
    """Raise Cancelled if this thread has been interrupted."""
    stop = _stop.get()
    if stop is not None and stop.is_set():
        raise Cancelled("interrupted")


def sleep(seconds: float) -> None:
    """Wait; raise Cancelled as soon as this thread is interrupted."""
    stop = _stop.get()
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Cancelled("interrupted")
