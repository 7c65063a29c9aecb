"""The command line: one module per command, what they show in `views/`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """The `disagg` program. Ctrl-C while `app` is still being imported ends it as quietly as later.

    By a handler, not by catching KeyboardInterrupt: raised in the middle of an import, that may come out as another
    exception (of `unicodedata` as a SyntaxError). Nothing has been done yet that would need cleaning up.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    from disagg.cli.app import main as run

    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
