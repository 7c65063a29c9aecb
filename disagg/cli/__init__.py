"""The command line: one module per command, what they show in `views/`."""

from __future__ import annotations

import sys


def main() -> None:
    """The `disagg` program. Outside of `app`, so that Ctrl-C during app's imports ends it as quietly as later."""
    try:
        from disagg.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
