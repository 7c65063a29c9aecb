"""Interrupt the waits of other threads, and bound them in time: every wait on a machine checks here.

It raises Cancelled once its thread is interrupted, and FleetError once the thread's time is up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Event

from disagg.errors import Cancelled, FleetError


@dataclass(frozen=True, slots=True)
class _Bounds:
    """stop: ends waits at once. ends: the latest end of a wait, by time.monotonic(). late: the error's message then."""

    stop: Event
    ends: float
    late: str


_bounds: ContextVar[_Bounds | None] = ContextVar("bounds", default=None)

POLL_S = 0.2
"""The longest that a wait may last between two checks."""
LATE_HINT = "give each host more time: --timeout"


@contextmanager
def interrupted_by(stop: Event, *, within: float | None = None, late: str = "") -> Iterator[None]:
    """Within, waits of this thread raise Cancelled once `stop` is set, and FleetError(late) after `within` seconds.

    Replaces the bounds of an outer one, so that cleaning up is not cut short."""
    token = _bounds.set(_Bounds(stop, math.inf if within is None else time.monotonic() + within, late))
    try:
        yield
    finally:
        _bounds.reset(token)


def check() -> None:
    """Raise Cancelled if this thread has been interrupted, FleetError if its time is up."""
    bounds = _bounds.get()
    if bounds is None:
        return
    if bounds.stop.is_set():
        raise Cancelled("interrupted")
    if time.monotonic() >= bounds.ends:
        raise FleetError(bounds.late, LATE_HINT)


def left() -> float:
    """The seconds that this thread may still wait; infinite without a bound."""
    bounds = _bounds.get()
    return math.inf if bounds is None else max(0.0, bounds.ends - time.monotonic())


def sleep(seconds: float) -> None:
    """Wait; raise as `check` does as soon as it would."""
    bounds = _bounds.get()
    if bounds is None:
        time.sleep(seconds)
        return
    bounds.stop.wait(min(seconds, left()))
    check()
