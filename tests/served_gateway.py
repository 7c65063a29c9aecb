"""`disagg serve` as a process of its own, in front of a fleet that a test has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from disagg.token import GATEWAY_FOLDER_VARIABLE, TOKEN_FILE_VARIABLE
from tests.deadlines import wait_until

START_S, STOP_S = 100.0, 60.0


@dataclass(frozen=True, slots=True)
class ServedGateway:
    """url: without /v1. log: what it has written."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def served_gateway(
    hosts_toml: Path, folder: Path | None = None, port: int = 0, *, options: Sequence[str] = ()
) -> Iterator[ServedGateway]:
    """The gateway of this hosts.toml, whose token is beside it. folder: of its files, by default the same one. It ends
    with exit code 0, unless the block has ended it in another way."""
    folder = folder or hosts_toml.parent
    command = [sys.executable, "-m", "disagg", "serve", "--port", str(port), "--config", str(hosts_toml), *options]
    variables = {TOKEN_FILE_VARIABLE: str(hosts_toml.parent / "token"), GATEWAY_FOLDER_VARIABLE: str(folder)}
    log = folder / "gateway.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **variables}
        )
    try:
        wait_until(lambda: process.poll() is not None or "Serving" in log.read_text(), START_S, "the gateway")
        found = re.search(r"at (https?://\S+)/v1", log.read_text())
        assert found is not None, log.read_text()
        yield ServedGateway(found[1], process, log)
        if process.poll() is None:
            process.terminate()
            assert process.wait(STOP_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
