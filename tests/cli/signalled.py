"""Runs a command with fakes in a process of its own, which sends itself a signal once all answers have begun.

`python signalled.py SIGNAL PIDS_FILE ARGS...`: the pids of spawned servers go to PIDS_FILE, "closed MODEL" to stderr
when a stream is closed. A signal inside the test process itself would interrupt pytest wherever it stands.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from disagg.cli.app import main
from disagg.fleet.lifecycle import fleet_servers
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.machine import process as local
from disagg.inference import client
from disagg.inference.types import Chunk, Completion
from tests.cli.answers import FakeClient
from tests.fleet.yards import fake_server

NUMBER, PIDS = int(sys.argv[1]), Path(sys.argv[2])


begun: list[str] = []


class Signalled(FakeClient):
    async def answer(self, model: str, deliver: Callable[[Chunk], None]) -> Completion:
        deliver(Chunk(f"begun by {model}", ()))
        begun.append(model)
        try:
            if len(begun) == len(FakeClient.requests):
                os.kill(os.getpid(), NUMBER)
            await asyncio.sleep(30)
        finally:
            sys.stderr.write(f"closed {model}\n")
        raise AssertionError("the signal ends this program")


def argv(fleet: Any, host: Any) -> tuple[list[str], dict[str, str]]:
    return fake_server(host, "serve"), {}


def spawn(*arguments: Any, **options: Any) -> int:
    pid = real_spawn(*arguments, **options)
    with PIDS.open("a") as pids:
        pids.write(f"{pid}\n")
    return pid


real_spawn = local.spawn
for module, name, fake in (
    (local, "spawn", spawn),
    (fleet_servers, "FleetServers", functools.partial(FleetServers, argv=argv)),
    (client, "AsyncClient", Signalled),
):
    setattr(module, name, fake)
main(sys.argv[3:])
