"""Deadlines that separate a hang from a slow machine. They are long: no test measures speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONG_S = 60.0


@contextmanager
def ends_by_itself(seconds: float = LONG_S) -> Iterator[None]:
    """Fails if the block takes `seconds`, which is how long the thing takes that it must not wait for."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds, f"took {seconds:g} s or more"


def wait_until(condition: Callable[[], object], seconds: float = LONG_S, what: str = "the condition") -> None:
    """Poll until the condition holds; fails if it does not within `seconds`. A cheap condition is polled more often."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        assert now < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(min(max(0.002, 4 * (now - began)), 0.02))
