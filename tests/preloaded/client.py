"""`python -m tests.preloaded.client PROGRAM ARGV`: as `python -m PROGRAM ARGV`, with the frameworks imported already.

For programs that start others by a command. This process waits for the fork that runs the program, whose stdin,
stdout and stderr are this one's; it ends with this one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.preloaded import Preloaded

_DAY_S = 86_400.0


def main() -> int:
    program, *argv = sys.argv[1:]
    input, out, err = (Path(f"/proc/{os.getpid()}/fd/{descriptor}") for descriptor in range(3))
    code = Preloaded().start(argv, os.environ, out, program=program, errors=err, input=input).wait(_DAY_S)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
