"""What a fork of a process with the frameworks does: run a program, as an interpreter of its own would."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tests.threads import name_threads_in_the_system


def run_and_exit(program: str, argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """As `python -m PROGRAM ARGV` in this environment."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        name_threads_in_the_system()
        sys.argv = [program, *argv]
        sys.path += os.environ.get("PYTHONPATH", "").split(os.pathsep)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:  # a server ends by itself, without coming back here
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
