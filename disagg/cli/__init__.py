"""The command line: one module per command, what they show in `views/`."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def main() -> None:
    """The `disagg` program. Ctrl-C while `app` is still being imported prints "interrupted" and exits with 130.

    By a handler, not by catching KeyboardInterrupt: raised during an import, it may surface as another
    exception (in `unicodedata` as a SyntaxError). Nothing needs to be cleaned up yet.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default:
        signal.signal(signal.SIGINT, _exit_at_once)
    from disagg.cli.app import main as run

    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _exit_at_once(number: int, frame: object) -> None:
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(130)
