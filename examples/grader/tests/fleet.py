"""A fleet of the project on this machine, on ports of its own, with a gateway."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).parents[3]
PROGRAM: Final = str(PROJECT / ".venv" / "bin" / "disagg")
START_S: Final = 60


@dataclass(frozen=True, slots=True)
class Fleet:
    """folder: its files. url: of its gateway, with /v1. environment: of its commands."""

    folder: Path
    url: str
    environment: Mapping[str, str]

    def disagg(self, *arguments: str) -> None:
        subprocess.run([PROGRAM, *arguments], env=dict(self.environment), check=True, stdout=sys.stderr)


@contextmanager
def running(folder: Path, hosts: Path) -> Iterator[Fleet]:
    """The fleet of this hosts.toml, with other ports and state in `folder`."""
    text = hosts.read_text("utf-8")
    port, *ports = free_ports(text.count("port = ") + 1)
    (folder / "hosts.toml").write_text(re.sub(r"port = \d+", lambda _: f"port = {ports.pop()}", text))
    own = {"XDG_STATE_HOME": str(folder / "state"), "DISAGG_CONFIG": str(folder / "hosts.toml")}
    fleet = Fleet(folder, f"http://127.0.0.1:{port}/v1", {**os.environ, **own})
    try:
        fleet.disagg("start")
        with (folder / "gateway.log").open("wb") as log:
            argv = [PROGRAM, "serve", "--port", str(port)]
            gateway = subprocess.Popen(argv, env=dict(fleet.environment), stdout=log, stderr=log)
        try:
            wait_for(port)
            yield fleet
        finally:
            gateway.terminate()
            gateway.wait(60)
    finally:
        fleet.disagg("stop")


def wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), 5)):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the gateway does not listen on port {port}")
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Different ports, below those that this machine gives to clients."""
    found: list[int] = []
    candidate = 20000 + os.getpid() % 10000
    while len(found) < count:
        candidate += 1
        with closing(socket.socket()) as one, suppress(OSError):
            one.bind(("127.0.0.1", candidate))
            found.append(candidate)
    return found
