"""Stop one thread of another process, as a debugger does: SIGSTOP would stop all of them. Linux."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Final

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_ALL_THREADS: Final = 0x40000000  # of waitpid: also those that are not children
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def busiest_thread(pid: int) -> int:
    """The thread that has computed for longest, beside the first one: a server's first thread has its event loop, and
    the busiest other one its engine."""
    tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid)]
    return int(max(tasks, key=lambda task: int((task / "schedstat").read_text().split()[0])).name)


class StoppedThread:
    """A thread that is stopped from now until `release`."""

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._stopped, self._released = threading.Event(), threading.Event()
        self._error: OSError | None = None
        self._tracer = threading.Thread(target=self._trace, name=f"tracer of {thread_id}", daemon=True)
        self._tracer.start()
        self._stopped.wait()
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Let it go on. Does nothing if its process has ended."""
        self._released.set()
        self._tracer.join()

    def _trace(self) -> None:
        """All of it on one thread, which is the only one that may control the stopped one."""
        try:
            _ptrace(_SEIZE, self._thread_id)
            _ptrace(_INTERRUPT, self._thread_id)
            os.waitpid(self._thread_id, _ALL_THREADS)
        except OSError as error:
            self._error = error
            return
        finally:
            self._stopped.set()
        self._released.wait()
        _libc.ptrace(_DETACH, self._thread_id, None, None)


def _ptrace(request: int, thread_id: int) -> None:
    if _libc.ptrace(request, thread_id, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace of {thread_id}: {os.strerror(number)}")
