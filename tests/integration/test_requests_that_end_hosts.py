"""A request that ends its host's process, on a real fleet of simulated engines whose servers are started again."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from disagg.errors import RequestEndedHosts
from disagg.inference.client import AsyncClient, Client
from disagg.inference.options import RequestOptions
from tests.deadlines import wait_until
from tests.fleets import TOKEN, RunningFleet, running
from tests.hostile.ending import ENDLESS, ENDS_DECODE, ENDS_PREFILL
from tests.simulated import write_simulated

HONEST = 8
LONG = 6000
"""Tokens of an answer that takes seconds."""


@contextmanager
def supervised(fleet: RunningFleet) -> Iterator[Counter[str]]:
    """Starts servers that end again, as a service manager does. How often each host has ended."""
    ended, stop = Counter[str](), threading.Event()

    def watch() -> None:
        while not stop.wait(0.05):
            for name, process in list(fleet.processes.items()):
                if process.poll() is not None:
                    ended[name] += 1
                    fleet.start(fleet.fleet.hosts[name])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield ended
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Two prefill and two decode hosts, which some prompts end."""
    folder = tmp_path_factory.mktemp("ending")
    with running(write_simulated(folder, pairs=2), program="tests.hostile.ending") as fleet:
        yield fleet


def all_up(fleet: RunningFleet) -> None:
    for host in fleet.fleet.hosts.values():
        wait_until(partial(_is_up, fleet, host.name), 60, f"{host.name} to be up again")


def _is_up(fleet: RunningFleet, host: str) -> bool:
    try:
        return bool(fleet.status(host)["status"] == "ok")
    except httpx.TransportError:
        return False


async def test_a_request_that_waited_in_a_queue_before_it_ends_its_host_is_a_suspect_too(tmp_path: Path) -> None:
    """Its host states that it begins before it does: until then it stated that the request waits."""
    with (
        running(write_simulated(tmp_path, pairs=2, max_batch=1), program="tests.hostile.ending") as fleet,
        supervised(fleet) as ended,
    ):
        async with AsyncClient(fleet.fleet, token=TOKEN) as client:
            await client.connect()
            answers = [client.generate("m", tokens=[9] * (60 + n), max_tokens=LONG, ignore_eos=True) for n in range(2)]
            honest = [asyncio.ensure_future(answer) for answer in answers]
            async with asyncio.timeout(30):
                while sum(fleet.status(name)["running"] for name in ("m-decode", "m-decode-2")) < 2:
                    await asyncio.sleep(0.02)
            with pytest.raises(RequestEndedHosts):
                await client.generate("m", tokens=[7] * 40 + [ENDS_DECODE])
            assert [len(answer.tokens) for answer in await asyncio.gather(*honest)] == [LONG, LONG]
            wait_until(lambda: sum(ended.values()) == 2, 10, "both to be seen")


async def test_a_request_whose_hosts_are_stopped_on_purpose_is_no_suspect(tmp_path: Path) -> None:
    """As a restart of host after host does it to a prompt that takes longer than a host drains."""
    with (
        running(write_simulated(tmp_path, pairs=2), program="tests.hostile.ending") as fleet,
        supervised(fleet) as ended,
    ):
        async with AsyncClient(fleet.fleet, token=TOKEN) as client:
            await client.connect()
            asked = asyncio.ensure_future(client.generate("m", tokens=[9] * 40 + [ENDLESS], alone="decode"))
            async with asyncio.timeout(40):
                for count in range(3):
                    while not (at := [name for name in ("m-decode", "m-decode-2") if _computes(fleet, name)]):
                        assert not asked.done(), asked.exception()
                        await asyncio.sleep(0.02)
                    if count < 2:
                        await _stop(fleet, at[0])
                        while sum(ended.values()) == count:
                            await asyncio.sleep(0.02)
            asked.cancel()


async def _stop(fleet: RunningFleet, host: str) -> None:
    """With a second signal, as if it had drained for as long as it may."""
    process = fleet.processes[host]
    process.terminate()
    while fleet.status(host)["status"] != "draining":
        await asyncio.sleep(0.02)
    process.terminate()


def _computes(fleet: RunningFleet, host: str) -> bool:
    try:
        return int(fleet.status(host)["running"]) > 0
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("ends", [ENDS_DECODE, ENDS_PREFILL], ids=["a decode host", "a prefill host"])
async def test_a_request_that_ends_its_host_is_tried_on_one_more_and_eight_honest_ones_beside_it_are_answered(
    fleet: RunningFleet, ends: int
) -> None:
    # Without "fail" and False a decode host would compute a prompt that prefill hosts do not.
    tokens = [7] * 40 + [ends] + [7] * 8
    poison: RequestOptions = {"tokens": tokens, "max_tokens": 16, "on_kv_failure": "fail", "local_prefill": False}
    with supervised(fleet) as ended:
        async with AsyncClient(fleet.fleet, token=TOKEN) as client:
            await client.connect()
            honest = [
                asyncio.ensure_future(client.generate("m", tokens=[9] * (60 + n), max_tokens=400, ignore_eos=True))
                for n in range(HONEST)
            ]
            with pytest.raises(RequestEndedHosts, match="ended while computing this request"):
                await client.generate("m", **poison)
            answers = await asyncio.gather(*honest)
            assert [len(answer.tokens) for answer in answers] == [400] * HONEST
            wait_until(lambda: sum(ended.values()) == 2, 10, "both to be seen")
            with pytest.raises(RequestEndedHosts, match="refused for 300 s"):
                await client.generate("m", **poison)
        all_up(fleet)
        with Client(fleet.fleet, token=TOKEN) as other:
            other.connect()
            with pytest.raises(RequestEndedHosts, match="refused for 300 s"):
                other.generate("m", **poison)
            assert other.generate("m", tokens=[7] * 41, max_tokens=16).metrics.completion_tokens == 16
        assert sum(ended.values()) == 2, ended
