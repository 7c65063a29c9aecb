from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from disagg.token import TOKEN_FILE_VARIABLE
from tests.fleets import RunningFleet, wait_until

START_S = 60.0
STOP_S = 60.0


@pytest.fixture(scope="session")
def gateway(tiny_fleet: RunningFleet) -> Iterator[str]:
    """`disagg serve` in front of `tiny_fleet`: its URL, without /v1."""
    command = [sys.executable, "-m", "disagg", "serve", "--port", "0", "--config", str(tiny_fleet.fleet.path)]
    environment = {
        **os.environ,
        TOKEN_FILE_VARIABLE: str(tiny_fleet.folder / "token"),
        "XDG_STATE_HOME": str(tiny_fleet.folder / "gateway-state"),
    }
    log = tiny_fleet.folder / "gateway.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        wait_until(lambda: process.poll() is not None or "Serving" in log.read_text(), START_S, "the gateway")
        found = re.search(r"at (http://\S+)/v1", log.read_text())
        assert found is not None, log.read_text()
        yield found[1]
    finally:
        process.terminate()
        try:
            assert process.wait(STOP_S) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
