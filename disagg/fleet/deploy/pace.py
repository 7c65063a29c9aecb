"""How far an upload has come, as a line: bytes, rate, and the time that is left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from disagg.units import estimate

EVERY_S = 1.0
"""Between two lines."""
OVER_S = 15.0
"""The rate is that of the last so many seconds."""


class UploadPace:
    """Makes lines of the progress of one upload. clock: in seconds."""

    def __init__(self, on_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_line, self._clock = on_line, clock
        self._seen: deque[tuple[float, int]] = deque()

    def moved(self, moved: int, total: int, sent: int) -> None:
        """So many of all bytes are there. See OnMoved."""
        now = self._clock()
        if not self._seen:
            self._seen.append((now, sent))
        if now - self._seen[-1][0] < EVERY_S:
            return
        while len(self._seen) > 1 and now - self._seen[0][0] > OVER_S:
            self._seen.popleft()
        began, before = self._seen[0]
        self._seen.append((now, sent))
        self._on_line(line(moved, total, (sent - before) / (now - began)))


def line(moved: int, total: int, rate: float) -> str:
    """`12 of 242 MB, 1.1 MB/s, 3 min left`. rate: bytes per second."""
    done = f"{moved / 1e6:.0f} of {total / 1e6:.0f} MB"
    if rate <= 0:
        return done
    return f"{done}, {rate / 1e6:.1f} MB/s, {estimate((total - moved) / rate)} left"
