"""The command line: one module per command with what it shows; `views/` is what several of them show.

This module and `disagg` itself import almost nothing: until `main` runs, Ctrl-C gives a traceback.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """The `disagg` program. Ctrl-C while `app` is still being imported prints "interrupted" and exits with 130.

    By a handler, not by catching KeyboardInterrupt: raised during an import, it may surface as another
    exception (in `unicodedata` as a SyntaxError). Nothing needs to be cleaned up yet.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default:
        signal.signal(signal.SIGINT, _exit_while_importing)
    from disagg.cli.app import main as run

    try:
        if default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # before or after the part of `run` that reports it
        _exit_at_once()
    except SystemExit as end:
        _exit_beside_threads(end.code)
        raise


def _exit_beside_threads(code: str | int | None) -> None:
    """End the process if a thread still runs, such as one that waits for a host that does not answer.

    Only output and logs are flushed. The interpreter's own shutdown aborts the process now and again (exit code 134
    or 139) if another thread is inside cryptography, which paramiko imports and uses.
    """
    import logging
    import threading
    from contextlib import suppress

    if threading.active_count() == 1 or isinstance(code, str):
        return
    for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            flush()
    os._exit(code or 0)


def _exit_while_importing(*_: object) -> None:
    words = sys.argv[1:]
    if "--json" in (words[: words.index("--")] if "--" in words else words):
        os.write(1, b'{"error": {"code": "Cancelled", "message": "interrupted", "hint": ""}}\n')
    _exit_at_once()


def _exit_at_once(*_: object) -> None:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)
