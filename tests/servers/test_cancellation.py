"""A caller that goes away leaves nothing behind on either host."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from typing import Any

import httpx
import pytest

from disagg.inference.client import AsyncClient
from tests.deadlines import wait_until
from tests.fleets import TOKEN, RunningFleet

CANCELLED_REQUESTS = 200
AT_ONCE = 8
PROMPT = "class Stack:\n    def __init__(self):\n" * 12


def unheld(**options: Any) -> dict[str, Any]:
    """The body of a request of whose prompt nothing is held."""
    return {"model": "tiny", "prompt": PROMPT, "cache_salt": secrets.token_hex(8), **options}


def idle(fleet: RunningFleet) -> bool:
    figures = [fleet.status(host) for host in fleet.fleet.hosts]
    return all((f["running"], f["queue"], f["kv_bytes"]) == (0, 0, 0) for f in figures)


@pytest.mark.timeout(300)
async def test_200_requests_cancelled_at_random_moments_leave_nothing_a_second_later(tiny_fleet: RunningFleet) -> None:
    chance = random.Random(7)
    gate = asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(tiny_fleet.fleet, token=TOKEN) as client:
        began = time.monotonic()
        await client.generate("tiny", PROMPT, max_tokens=40)
        usual = time.monotonic() - began

        async def cancelled_midway() -> None:
            async with gate:
                request = asyncio.ensure_future(client.generate("tiny", PROMPT, max_tokens=1000))
                await asyncio.wait((request,), timeout=chance.uniform(0, usual * 2))
                if not request.cancel():
                    request.result()  # no error; it is no longer than `usual` was for 40 tokens
                await asyncio.wait((request,))
                ended.append(request.cancelled())

        ended: list[bool] = []
        await asyncio.gather(*(cancelled_midway() for _ in range(CANCELLED_REQUESTS)))
        assert sum(ended) > CANCELLED_REQUESTS / 2
        await asyncio.to_thread(wait_until, lambda: idle(tiny_fleet), 20, "both hosts to hold nothing")
        answer = await client.generate("tiny", PROMPT, max_tokens=4)
    assert len(answer.tokens) == 4


def test_a_caller_that_leaves_before_its_kv_came_frees_the_slot(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.http("tiny-decode") as http:
        with http.stream("POST", "/decode", json=unheld()) as answer:
            lines = answer.iter_lines()  # held: the response closes when its iterator is dropped
            assert next(lines) == "event: slot"
            assert not idle(tiny_fleet)
        wait_until(lambda: idle(tiny_fleet), 60, "the slot to be freed")


@pytest.mark.parametrize(
    ("host", "path", "until", "phase"),
    [
        ("decode", "/decode", "event: slot", "waiting for KV"),
        ("prefill", "/generate", "event: tokens", "generating"),
    ],
)
def test_a_cancelled_request_leaves_a_log_line(
    tiny_fleet: RunningFleet, host: str, path: str, until: str, phase: str
) -> None:
    request_id = secrets.token_hex(8)
    body = unheld(sampling={"max_tokens": 1500, "ignore_eos": True})

    def logged() -> list[dict[str, Any]]:
        lines = map(json.loads, tiny_fleet.log(f"tiny-{host}").splitlines())
        return [line for line in lines if line["event"] == "request_cancelled" and line["request_id"] == request_id]

    with (
        tiny_fleet.http(f"tiny-{host}") as http,
        http.stream("POST", path, json=body, headers={"X-Request-Id": request_id}) as answer,
    ):
        lines = answer.iter_lines()
        assert until in lines
    wait_until(logged, 60, "the log line")
    assert [line["phase"] for line in logged()] == [phase]


def test_kv_that_never_comes_ends_the_request_at_its_deadline(tiny_fleet: RunningFleet) -> None:
    with tiny_fleet.http("tiny-decode") as http:
        answer = http.post("/decode", json=unheld(deadline_s=0.3))
    assert answer.status_code == httpx.codes.OK
    assert "event: error" in answer.text
    assert "deadline" in answer.text.splitlines()[-2]
    wait_until(lambda: idle(tiny_fleet), 60, "the slot to be freed")
