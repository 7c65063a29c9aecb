"""`python -m tests.keeper.forking ARGV`: as `python -m disagg.keeper ARGV`, forked from tests.preloaded, and with the
processes of its models forked from itself: none imports the frameworks again. It sooner looks again for files that it
misses."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Final

from disagg.keeper import child, processes
from disagg.keeper.__main__ import main
from tests.preloaded.program import run_and_exit

LOOK_AGAIN_S: Final = 2.0
_OWN_SIGNALS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_MODULE_AT: Final = 2
"""In the command of a process: after the interpreter and -m."""


class Forked:
    """What a keeper uses of a Popen, for a fork of the keeper."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        start_new_session: bool,
        pass_fds: tuple[int, ...],
        env: Mapping[str, str],
    ) -> None:
        assert stdin == subprocess.DEVNULL and start_new_session
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _leave_the_keeper(stdout, stderr, pass_fds)
            run_and_exit(command[_MODULE_AT], command[_MODULE_AT + 1 :], env)

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code


def _leave_the_keeper(stdout: int, stderr: int, kept: tuple[int, ...]) -> None:
    """Give up what an exec would: the session, what signals do, and all files but these."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in _OWN_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()  # else what is collected here closes numbers that have other files then
    null = os.open(os.devnull, os.O_RDONLY)
    for target, descriptor in enumerate((null, stdout, stderr)):
        os.dup2(descriptor, target)
    last = 2
    for descriptor in sorted(kept):
        os.closerange(last + 1, descriptor)
        last = descriptor
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def _take_over_the_hubs_settings() -> None:
    """huggingface_hub reads them from the environment when it is imported."""
    importlib.reload(importlib.import_module("huggingface_hub.constants"))


if __name__ == "__main__":
    _take_over_the_hubs_settings()
    vars(processes)["LOOK_AGAIN_S"] = LOOK_AGAIN_S
    vars(child)["subprocess"] = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
    sys.exit(main())
