"""The last resort: a thread that ends the process if its engine or its event loop does not come back.

A service manager starts the process again. systemd, and disagg's own supervisor, are also notified every few seconds
that this thread runs, and restart a process that is stopped altogether.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from disagg import logs

EXIT_CODE = 70
"""Of a process that ended itself because its engine, or its event loop, did not come back."""
TICK_S = 5.0
STUCK_S = 60.0
"""How long a problem that may pass lasts before the process ends."""
DEAD_S = 5.0
"""The same for a problem that cannot pass. Callers get their errors meanwhile."""
NOTIFIED_S = 90
"""A service manager that this thread has sent nothing for so long restarts the process."""


class Problem(NamedTuple):
    """What is wrong, "" if nothing is, and for how many seconds it may be."""

    text: str = ""
    patience_s: float = STUCK_S


class Watchdog:
    """problem: what is wrong now; called on the watchdog's thread. exit: ends the process."""

    def __init__(self, problem: Callable[[], Problem], exit: Callable[[int], object] = os._exit) -> None:
        self._problem = problem
        self._exit = exit
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._bad_s = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def tick(self, elapsed: float) -> None:
        """Judge after `elapsed` seconds. More than two ticks count as two: the process, or its machine, was stopped."""
        problem = self._problem()
        self._bad_s = self._bad_s + min(elapsed, 2 * TICK_S) if problem.text else 0.0
        if self._bad_s > problem.patience_s:
            self._end(problem)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(TICK_S):
            now = time.monotonic()
            self.tick(now - before)
            before = now
            notify("WATCHDOG=1")

    def _end(self, problem: Problem) -> None:
        hint = "the traces below show where it is stuck; a service manager starts it again"
        message = f"{problem.text} for {self._bad_s:.0f} s, so the server ends with code {EXIT_CODE}"
        logs.event(logging.ERROR, "watchdog", code="ModelError", message=message, hint=hint)
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(2)
        self._exit(EXIT_CODE)


def notify_ready() -> None:
    """Notify the service manager that this process is ready, and of the longest time between its later notifications.
    Not before the model is loaded: native code that loads it may hold up every thread for minutes."""
    notify(f"READY=1\nWATCHDOG_USEC={NOTIFIED_S * 1_000_000}")


def notify(state: str) -> None:
    """Notify systemd, or disagg's supervisor, as in sd_notify(3). Does nothing without $NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:  # it may have ended
        to.settimeout(1.0)
        to.connect("\0" + address[1:] if address.startswith("@") else address)
        to.send(state.encode())
