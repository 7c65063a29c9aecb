"""How a program that has run mlx ends."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def exit_without_cleanup(code: int) -> NoReturn:
    """End this process at once with `code`; all that must be closed has been closed.

    Without the interpreter's own end: a stream's thread that mlx left behind then aborts the process now and again
    ("terminate called without an active exception", exit code 134 in one of four ends of a decode server that had
    answered a request), and a service manager would take that for a crash.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
