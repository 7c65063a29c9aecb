"""disagg/servers/host/work.py: what requests make a host compute holds up nobody who looks at it, or leaves it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from disagg.api.requests import Share
from disagg.servers.app import build
from disagg.servers.host.service import SHORT_TEXT, AnyService
from disagg.servers.host.work import BOUNDS, RequestWork
from disagg.servers.monitor import Monitor, Problems
from disagg.servers.run import _Server, listener_of
from disagg.token import Tokens
from tests.servers.host.test_service import idle, serving
from tests.servers.test_stuck_engine import ENCRYPTION, PATIENCE_S, TOKEN, client

SOON_S = 1.0
"""In which a host answers who looks at it. The gateway and `disagg status` wait for longer."""
SLOW = {"model": "m", "prompt": "a" * SHORT_TEXT, "sampling": {"max_tokens": 1}}
LOOKS = ("/health", "/load", "/status")


@dataclass
class Gate:
    """Work that waits until it is opened."""

    begun: int = 0
    opened: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> int:
        self.begun += 1
        assert self.opened.wait(PATIENCE_S)
        return self.begun


@pytest.fixture
def gate() -> Any:
    one = Gate()
    yield one
    one.opened.set()


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(params=["m-prefill", "m-decode"])
async def service(request: pytest.FixtureRequest, tmp_path: Path, gate: Gate) -> AsyncIterator[AnyService]:
    """A service behind HTTP, whose tokenizer takes until the gate is opened for a long prompt."""
    async with serving(tmp_path, request.param) as one:
        tokenizer: Any = one.engine.tokenizer
        encode = tokenizer.encode
        tokenizer.encode = lambda *given, **more: (gate.wait() if "limit" in more else 0, encode(*given, **more))[1]
        server = _Server(one, build(one, Tokens(TOKEN)), ENCRYPTION)
        running = asyncio.ensure_future(server.serve([listener_of(one.host)]))
        await until(lambda: server.started)
        yield one
        gate.opened.set()
        server.should_exit = True
        async with asyncio.timeout(PATIENCE_S):
            await running


async def test_health_load_and_status_answer_while_slow_prompts_have_every_thread(
    service: AnyService, gate: Gate
) -> None:
    """A caller that leaves frees its place at once, a count that waits too."""
    async with client(service) as http:
        asked = [asyncio.ensure_future(http.post("/generate", json=SLOW)) for _ in range(BOUNDS.threads + 1)]
        counted = asyncio.ensure_future(http.post("/count", json={"model": "m", "prompt": SLOW["prompt"]}))
        await until(lambda: gate.begun == BOUNDS.threads and len(service.active) == BOUNDS.threads + 1)
        for path in LOOKS:
            began = time.monotonic()
            looked = await http.get(path)
            assert looked.status_code == 200 and looked.json()["status"] == "ok"
            assert time.monotonic() - began < SOON_S, path
        for leaving in (*asked, counted):
            leaving.cancel()
        await until(lambda: not service.active and idle(service))
        assert gate.begun == BOUNDS.threads, "what waited has not begun"
        gate.opened.set()
        answered = await http.post("/generate", json=SLOW)
        assert answered.status_code == 200 and "event: done" in answered.text


async def test_a_host_whose_threads_are_stuck_says_so_and_sends_who_waits_elsewhere(
    service: AnyService, gate: Gate
) -> None:
    monitor = Monitor(service)
    problems = Problems(service, monitor)
    async with client(service) as http:
        asked = [asyncio.ensure_future(http.post("/generate", json=SLOW)) for _ in range(BOUNDS.threads + 1)]
        await until(lambda: gate.begun == BOUNDS.threads and len(service.active) == BOUNDS.threads + 1)
        service.work._begun = {piece: began - BOUNDS.stuck_s - 1 for piece, began in service.work._begun.items()}
        looked = await http.get("/health")
        assert looked.status_code == 503 and looked.json()["status"] == "stalled"
        monitor.tick(time.monotonic())
        assert "that prepare requests are stuck" in problems().text, "the watchdog ends the process in time"
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 502 and "have been stuck" in answer.text
        gate.opened.set()
        await until(lambda: not service.work.stuck_s(time.monotonic()))
        assert (await http.get("/health")).json()["status"] == "ok" and not service.problem


async def test_a_process_that_was_stopped_is_not_stuck(gate: Gate) -> None:
    work = RequestWork()
    running = [asyncio.ensure_future(work.run(Share(), gate.wait)) for _ in range(BOUNDS.threads)]
    await until(lambda: gate.begun == BOUNDS.threads)
    late = time.monotonic() + 2 * BOUNDS.stuck_s
    assert work.stuck_s(late) > BOUNDS.stuck_s
    work.excuse(late)
    assert work.stuck_s(late + 1) == 0
    gate.opened.set()
    await asyncio.gather(*running)


async def test_a_key_with_many_long_prompts_does_not_hold_up_another_key_s(gate: Gate) -> None:
    work = RequestWork()
    greedy = [asyncio.ensure_future(work.run(Share("greedy"), gate.wait)) for _ in range(20)]
    await until(lambda: gate.begun == BOUNDS.threads)
    modest = asyncio.ensure_future(work.run(Share("modest"), lambda: gate.begun))
    await asyncio.sleep(0)
    gate.opened.set()
    assert await modest <= 2 * BOUNDS.threads
    await asyncio.gather(*greedy)


async def test_an_error_of_work_is_its_caller_s() -> None:
    with pytest.raises(ZeroDivisionError):
        await RequestWork().run(Share(), lambda: 1 // 0)
