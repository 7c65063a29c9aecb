"""A gateway that is killed with SIGKILL under load and started again: no cut answer looks complete, and the history has
what its clients have seen complete."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from benchmarks.gateway_load import Bodies, End, Tally, asked_alone, load_gateway, missing_from_history
from disagg.token import GATEWAY_FOLDER_VARIABLE, TOKEN_FILE_VARIABLE
from tests.fleets import RunningFleet, wait_until
from tests.ports import free_ports

STREAMS: Final = 20
COMPLETE: Final = 20  # answers before the gateway is killed, and as many after it
WITHIN_S: Final = 100.0
BODIES: Final[Bodies] = tuple(
    {"model": "tiny", "prompt": f"{number} times", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for number in range(4)
)


def serve(fleet: RunningFleet, folder: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    """`disagg serve` with its files in a folder of its own: the process and its URL."""
    environment = {
        **os.environ,
        TOKEN_FILE_VARIABLE: str(fleet.folder / "token"),
        GATEWAY_FOLDER_VARIABLE: str(folder),
    }
    log = folder / "gateway.log"
    command = [sys.executable, "-m", "disagg", "serve", "--port", str(port), "--config", str(fleet.fleet.path)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    wait_until(lambda: process.poll() is not None or "Serving" in log.read_text(), WITHIN_S, "the gateway")
    found = re.search(r"at (http://\S+)/v1", log.read_text())
    assert found is not None, log.read_text()
    return process, found[1]


async def until_complete(tally: Tally, answers: int) -> None:
    while tally.ends[End.COMPLETE] < answers:
        await asyncio.sleep(0.02)


async def load_and_kill(fleet: RunningFleet, folder: Path) -> Tally:
    """Load the gateway, kill it, start it again at the same address, and load it on."""
    tally, until, (port,) = Tally(), asyncio.Event(), free_ports(1)
    process, url = await asyncio.to_thread(serve, fleet, folder, port)
    try:
        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
            questions = await asked_alone(url, BODIES)
            group.create_task(load_gateway(url, questions, STREAMS, tally, until))
            await until_complete(tally, COMPLETE)
            process.kill()
            process.wait()
            process, _ = await asyncio.to_thread(serve, fleet, folder, port)
            await until_complete(tally, tally.ends[End.COMPLETE] + COMPLETE)
            until.set()
    finally:
        process.kill()
        process.wait()
    return tally


async def test_no_cut_answer_looks_complete_and_every_complete_one_is_in_the_history(
    tiny_fleet: RunningFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = await load_and_kill(tiny_fleet, tmp_path)
    monkeypatch.setenv(GATEWAY_FOLDER_VARIABLE, str(tmp_path))
    assert tally.ends[End.CUT] == 0 and not tally.wrong
    assert tally.ends[End.BROKEN] + tally.ends[End.ERROR] > 0, "some streams were open"
    assert len(tally.finished) >= 2 * COMPLETE
    assert missing_from_history(tiny_fleet.fleet, tally.finished) == set()
