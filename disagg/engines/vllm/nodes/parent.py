"""The end of a worker whose parent has ended.

vLLM makes a worker's connector when the model is loaded. A worker whose parent is killed before, while it waits for
another node, is not watched: it ends when its process group times out, or with the cgroup of its service.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

POLL_S = 1.0


def end_with_parent(poll_s: float = POLL_S) -> None:
    """Kill this process within `poll_s` seconds after its parent has ended. vLLM's own workers end then, too, but one
    that waits for a message of another node goes on to wait, and keeps its GPU (0.32)."""
    threading.Thread(target=_watch, args=(_parent(), poll_s), name="parent", daemon=True).start()


def _parent() -> int:
    """The process that started this one, also if it has ended since."""
    started_by = multiprocessing.parent_process()
    return started_by.pid if started_by is not None and started_by.pid is not None else os.getppid()


def _watch(parent: int, poll_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(poll_s)
    os.kill(os.getpid(), signal.SIGKILL)
