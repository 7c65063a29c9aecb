"""Whether an engine makes progress: a count of finished pieces of work, and when the last one was."""

from __future__ import annotations

import threading
import time

STALLED_S = 10.0
"""An engine that has work and finishes no piece of it for this long is stalled. The longest piece is one decode step,
or one layer of a prompt's chunk, which take well under a second."""


class Progress:
    """Counts the beats of an engine: pieces of work that it has finished, for any request.

    `beat` is called on the engine's thread, `stalled` every second from one other thread. Time without work does not
    count. A stall lasts until the next beat: its requests are ended, so that nothing else would show it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beats = 0
        self._active_at = time.monotonic()  # of the last beat, or the last moment at which there was no work
        self._stalled = False

    @property
    def beats(self) -> int:
        return self._beats

    def beat(self) -> None:
        """One more piece of work is finished."""
        with self._lock:
            self._beats += 1
            self._active_at = time.monotonic()
            self._stalled = False

    def stalled(self, now: float, busy: bool) -> bool:
        """Whether the engine has had work and made no progress for STALLED_S. now: time.monotonic()."""
        if not busy:
            self.excuse(now)
        with self._lock:
            self._stalled = self._stalled or now - self._active_at > STALLED_S
            return self._stalled

    def excuse(self, now: float) -> None:
        """Do not count the time before `now`: there was no work, or the whole process was stopped."""
        with self._lock:
            self._active_at = max(self._active_at, now)
