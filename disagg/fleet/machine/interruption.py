"""One thread tells many to give up: what waits in between looks here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event

from disagg.errors import Cancelled

_stop: ContextVar[Event | None] = ContextVar("stop", default=None)

PATIENCE_S = 0.2
"""How long a wait may last before it looks again."""


@contextmanager
def listening_to(stop: Event) -> Iterator[None]:
    """Within, this thread gives up when `stop` is set."""
    token = _stop.set(stop)
    try:
        yield
    finally:
        _stop.reset(token)


def check() -> None:
    """Raise Cancelled if this thread is to give up."""
    stop = _stop.get()
    if stop is not None and stop.is_set():
        raise Cancelled("interrupted")


def sleep(seconds: float) -> None:
    """Wait so long; raise Cancelled as soon as this thread is to give up."""
    stop = _stop.get()
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Cancelled("interrupted")
