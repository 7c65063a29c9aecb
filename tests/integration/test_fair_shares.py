"""A greedy key beside modest ones, on a real fleet of simulated engines behind `disagg serve`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.gateway.clients.keys import KeyFile
from tests.fleets import running
from tests.served_gateway import served_gateway
from tests.simulated import write_simulated

REQUESTS, ITEMS, MODEST = 16, 32, 3
LONGEST_S = 30.0


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[str, KeyFile]]:
    """The URL of a gateway in front of a simulated pair, and the file of its keys."""
    with running(write_simulated(tmp_path)) as fleet, served_gateway(fleet.fleet.path) as served:
        yield served.url, KeyFile(tmp_path / "keys.json")


def body(number: int, tokens: int) -> dict[str, Any]:
    return {"model": "m", "prompt": f"{number} " * 40, "max_tokens": tokens, "ignore_eos": True}


async def test_modest_keys_are_answered_while_the_queue_of_a_greedy_one_stands(gateway: tuple[str, KeyFile]) -> None:
    url, file = gateway
    headers = {
        name: {"Authorization": f"Bearer {file.add(name, monitor=name == 'watching')}"}
        for name in ("greedy", "watching", *(f"modest {number}" for number in range(MODEST)))
    }
    async with httpx.AsyncClient(base_url=url, timeout=300.0, trust_env=False) as http, asyncio.timeout(240):

        async def greedy(first: int) -> None:
            items = [body(first + number, 512) for number in range(ITEMS)]
            await http.post("/v1/parallel", json={"requests": items}, headers=headers["greedy"])

        async def modest(name: str) -> list[float]:
            seconds = []
            for number in range(3):
                began = time.monotonic()
                answer = await http.post("/v1/completions", json=body(-number - 1, 16), headers=headers[name])
                assert answer.status_code == 200, answer.text
                seconds.append(time.monotonic() - began)
            return seconds

        async def waiting() -> float:
            lines = (await http.get("/metrics", headers=headers["watching"])).text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_waiting{"))

        asked = [asyncio.ensure_future(greedy(ITEMS * number)) for number in range(REQUESTS)]
        try:
            while await waiting() < REQUESTS * ITEMS // 2:
                await asyncio.sleep(0.05)
            times = await asyncio.gather(*(modest(f"modest {number}") for number in range(MODEST)))
            assert await waiting() > REQUESTS * ITEMS // 4, "the queue of the greedy key still stands"
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)
    assert max(map(max, times)) < LONGEST_S
