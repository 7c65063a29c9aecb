"""End a process that has used mlx, torch or vLLM."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


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
