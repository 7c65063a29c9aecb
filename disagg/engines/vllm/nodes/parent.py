"""The end of a worker whose parent has ended."""

from __future__ import annotations

import os
import signal
import threading
import time

POLL_S = 1.0


def end_with_parent(poll_s: float = POLL_S) -> None:
    """Kill this process within so many seconds after its parent has ended. vLLM's workers notice that, too, but one
    that waits for a message of another node goes on to wait, and keeps its GPU (0.32)."""
    threading.Thread(target=_watch, args=(os.getppid(), poll_s), name="parent", daemon=True).start()


def _watch(parent: int, poll_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(poll_s)
    os.kill(os.getpid(), signal.SIGKILL)
