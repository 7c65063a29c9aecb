"""Whether a `vllm serve` answers at all, asked every second.

A process that is stopped, or that hangs, keeps its connections: a request to it would wait until its own limits. This
asks what costs nothing, beside all requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from disagg.errors import DisaggError

HEALTH: Final = "/health"
EVERY_S: Final = 1.0
LIMIT_S: Final = 8.0
"""For an answer: a server that tokenises long prompts, or writes many answers, may take seconds."""
FAILURES: Final = 2
"""In a row, after which it is left."""


class Pulse:
    """Asks on a thread of its own until `close`, or until a server has not answered. ask: once, within so many seconds;
    raises DisaggError without an answer. on_end: called once with the last error."""

    def __init__(
        self,
        ask: Callable[[float], object],
        on_end: Callable[[DisaggError], None],
        *,
        every_s: float = EVERY_S,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._ask, self._on_end = ask, on_end
        self._every_s, self._limit_s = every_s, limit_s
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="vllm-pulse", daemon=True).start()

    def close(self) -> None:
        """Ask no more. Does not wait; `on_end` is not called by what is asked just now."""
        self._closed.set()

    def _run(self) -> None:
        failures = 0
        while not self._closed.wait(self._every_s):
            try:
                self._ask(self._limit_s)
                failures = 0
            except DisaggError as error:
                failures += 1
                if failures >= FAILURES:
                    if not self._closed.is_set():
                        self._on_end(error)
                    return
