"""Deadlines that separate a hang from a slow machine. They are long: no test measures speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

LONG_S = 60.0


@contextmanager
def ends_by_itself(seconds: float = LONG_S) -> Iterator[None]:
    """Fails if the block takes `seconds`, which is how long the thing takes that it must not wait for."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds, f"took {seconds:g} s or more"
