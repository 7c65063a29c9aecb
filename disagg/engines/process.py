"""What the process of a framework needs: an end without destructors, and threads that let others have a core."""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Final, NoReturn


def exit_without_cleanup(code: int) -> NoReturn:
    """Flush logs and output and end this process with `code`, without the interpreter's shutdown.

    mlx leaves a thread per stream behind, and during the interpreter's shutdown it sometimes aborts the process
    ("terminate called without an active exception": exit code 134 in one of four ends of a decode server that had
    answered a request). A service manager would take that for a crash.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


COMPUTE_NICE: Final = 5
"""A third of the share of a thread at nice 0. A prompt or a token takes all cores for tens of milliseconds, and the
thread that writes a finished token to its caller would wait for one as long."""


def lower_priority_of_thread() -> None:
    """Let the process's other threads have a core before this thread and those that it starts from now on.

    These threads also no longer take the core of the one that wakes them. MLX gives each operation to a thread of its
    own: a token of a small model cost hundreds of switches between the two, and a third more CPU time.

    Calling it again changes nothing. Only Linux has a nice value per thread; elsewhere this does nothing.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, max(COMPUTE_NICE, os.getpriority(os.PRIO_PROCESS, thread)))
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
