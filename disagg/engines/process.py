"""What the process of a framework needs: an end without destructors, and threads that let others have a core or the
disk."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
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


LOAD_NICE: Final = 15
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
"""The number of Linux's system call, which C libraries have no function for."""
_OF_A_THREAD: Final = 1
_LOWEST_BEST_EFFORT: Final = 2 << 13 | 7
_IOPOL: Final = 0, 0  # Apple's IOPOL_TYPE_DISK, IOPOL_SCOPE_PROCESS
_IOPOL_DEFAULT, _IOPOL_UTILITY = 0, 4


@contextmanager
def low_priority() -> Iterator[None]:
    """Threads that are started in this block, and this one, let other processes have the cores and the disk first.
    After it they compute with the priority of `lower_priority_of_thread`, and this one as before.

    A nice value is raised only if this process may lower it again, which Linux allows root, or by RLIMIT_NICE.
    Beside loads of another tiny model on two cores, 99 % of a model's tokens followed the one before within 3.5 to 4.4
    ms, without it within 4.7 to 25.6 ms; the loads took 2.5 s either way.
    """
    nice = sys.platform == "linux" and _may_lower_nice()
    mine = threading.get_native_id()
    if nice:
        os.setpriority(os.PRIO_PROCESS, mine, LOAD_NICE)
    _set_disk(mine, _LOWEST_BEST_EFFORT, _IOPOL_UTILITY)
    try:
        yield
    finally:
        for thread in _threads():
            _set_disk(thread, 0, _IOPOL_DEFAULT)
            with suppress(OSError):  # it has ended
                if nice and os.getpriority(os.PRIO_PROCESS, thread) == LOAD_NICE:
                    os.setpriority(os.PRIO_PROCESS, thread, 0 if thread == mine else COMPUTE_NICE)


def _may_lower_nice() -> bool:
    """Tried on a thread of its own, as a value that cannot be lowered would stay."""
    able: list[bool] = []

    def attempt() -> None:
        with suppress(OSError):
            thread = threading.get_native_id()
            before = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, before + 1)
            os.setpriority(os.PRIO_PROCESS, thread, before)
            able.append(True)

    trial = threading.Thread(target=attempt, name="nice")
    trial.start()
    trial.join()
    return bool(able)


def _threads() -> list[int]:
    if sys.platform == "linux":
        return [int(path.name) for path in Path("/proc/self/task").iterdir()]
    return [threading.get_native_id()]


def _set_disk(thread: int, linux: int, apple: int) -> None:
    """What the disk's scheduler thinks of a thread of Linux, or of this process of macOS."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and (number := _IOPRIO_SET.get(platform.machine())):
        libc.syscall(number, _OF_A_THREAD, thread, linux)
    elif sys.platform == "darwin":
        libc.setiopolicy_np(*_IOPOL, apple)
