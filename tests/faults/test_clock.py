"""A wall clock that jumps shifts what a process reads of it, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.clock import Clock, library

ECHO = """
import datetime, json, sys, time
for _ in sys.stdin:
    read = time.time(), time.time_ns() / 1e9, datetime.datetime.now().timestamp(), time.monotonic()
    print(json.dumps(read), flush=True)
"""


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_jump_shifts_the_wall_clock_of_a_running_process_and_not_its_monotonic_one(
    seconds: int, tmp_path: Path
) -> None:
    clock, pipe = Clock(tmp_path / "clock"), subprocess.PIPE
    environment = {**os.environ, **clock.variables, "LD_PRELOAD": str(library(tmp_path))}
    with subprocess.Popen([sys.executable, "-c", ECHO], stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        for shift in (0, seconds, 0):
            clock.jump(shift)
            *walls, monotonic = _asked(process)
            assert [round((wall - time.time()) / 600) * 600 for wall in walls] == [shift] * 3
            assert abs(monotonic - time.monotonic()) < 600
        process.kill()


def _asked(process: subprocess.Popen[str]) -> list[float]:
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return list(json.loads(process.stdout.readline()))
