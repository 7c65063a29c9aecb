"""Warnings that a peer can cause as often as it likes, written at a bounded rate."""

from __future__ import annotations

from collections.abc import Callable

INTERVAL_S = 10.0


class RepeatedWarning:
    """Writes the first warning at once; those that follow within `interval_s` become one line with their number.

    Used by one thread. what: what is counted, in the plural. Times are time.monotonic().
    """

    def __init__(self, what: str, write: Callable[[str], object], interval_s: float = INTERVAL_S) -> None:
        self._what = what
        self._write = write
        self._interval_s = interval_s
        self._quiet_until = float("-inf")
        self._count = 0
        self._last = ""

    def add(self, text: str, now: float) -> None:
        """One more happened."""
        if now >= self._quiet_until and self._count == 0:
            self._write(text)
            self._quiet_until = now + self._interval_s
        else:
            self._count += 1
            self._last = text
            self.flush(now)

    def flush(self, now: float) -> None:
        """Write the line about those that were not written, if it is due."""
        if self._count and now >= self._quiet_until:
            self._write(f"{self._count} more {self._what} within {self._interval_s:g} s; the last: {self._last}")
            self._quiet_until = now + self._interval_s
            self._count, self._last = 0, ""
