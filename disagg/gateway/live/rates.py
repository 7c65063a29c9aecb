"""Counts of the last seconds. Pure; times are time.monotonic()."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

WINDOW_S: Final = 5
MAX_VALUES: Final = 1000


class Rate:
    """A count per second, over the last WINDOW_S complete seconds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque()  # second, count; at most WINDOW_S + 1 of them

    def add(self, count: int, now: float) -> None:
        second = int(now)
        if self._counts and self._counts[-1][0] == second:
            count += self._counts.pop()[1]
        self._counts.append((second, count))
        self._forget(second)

    def per_s(self, now: float) -> float:
        """The rate. The present second does not count: it is not complete."""
        self._forget(second := int(now))
        complete = sum(count for at, count in self._counts if at != second)
        first = min((at for at, _ in self._counts), default=second)
        return complete / max(1, second - first)

    def _forget(self, second: int) -> None:
        while self._counts and self._counts[0][0] < second - WINDOW_S:
            self._counts.popleft()


class RecentMedian:
    """The median of the values of the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, value: float, now: float) -> None:
        self._values.append((now, value))

    def median(self, now: float) -> float | None:
        while self._values and self._values[0][0] < now - WINDOW_S:
            self._values.popleft()
        return median(value for _, value in self._values) if self._values else None
