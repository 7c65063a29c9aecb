"""A gateway that is killed with SIGKILL under load and started again: no cut answer looks complete, and the history has
what its clients have seen complete."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from benchmarks.gateway_load import Bodies, End, Tally, asked_alone, load_gateway, missing_from_history
from disagg.token import GATEWAY_FOLDER_VARIABLE
from tests.fleets import RunningFleet
from tests.ports import free_ports
from tests.served_gateway import ServedGateway, served_gateway

STREAMS: Final = 20
COMPLETE: Final = 20  # answers before the gateway is killed, and as many after it
WITHIN_S: Final = 100.0
BODIES: Final[Bodies] = tuple(
    {"model": "tiny", "prompt": f"{number} times", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for number in range(4)
)


async def until_complete(tally: Tally, answers: int) -> None:
    while tally.ends[End.COMPLETE] < answers:
        await asyncio.sleep(0.02)


async def load_and_kill(fleet: RunningFleet, folder: Path) -> Tally:
    """Load the gateway, kill it, start it again at the same address, and load it on."""
    tally, until, (port,) = Tally(), asyncio.Event(), free_ports(1)
    with ExitStack() as gateways:

        async def serve() -> ServedGateway:
            return await asyncio.to_thread(gateways.enter_context, served_gateway(fleet.fleet.path, folder, port))

        gateway = await serve()
        async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as group:
            questions = await asked_alone(gateway.url, BODIES)
            group.create_task(load_gateway(gateway.url, questions, STREAMS, tally, until))
            await until_complete(tally, COMPLETE)
            gateway.process.kill()
            gateway.process.wait()
            await serve()
            await until_complete(tally, tally.ends[End.COMPLETE] + COMPLETE)
            until.set()
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
