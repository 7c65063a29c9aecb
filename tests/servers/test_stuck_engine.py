"""An engine whose thread hangs inside a step: its callers, its health, and the end of its server. Simulated engines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from disagg.http.protocol import Encryption
from disagg.servers.app import build
from disagg.servers.host.health import StallPolicy
from disagg.servers.host.service import AnyService
from disagg.servers.monitor import EXIT_CODE, Monitor
from disagg.servers.prefill.service import PrefillService
from disagg.servers.run import _Server, listener_of
from disagg.servers.sse import StreamTimes, unfinished
from disagg.tls.certificate import ServerTLS
from disagg.token import TOKEN_FILE_VARIABLE, Tokens
from tests.servers.host.test_service import idle, serving
from tests.simulated import write_simulated
from tests.values import of_type

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
TOKEN = "test-token-of-sixteen-or-more"
ENCRYPTION = Encryption(ServerTLS(lambda: (TOKEN,)))  # and without: some callers here are sockets
LONG = {"model": "m", "tokens": [9] * 40, "sampling": {"max_tokens": 10_000, "ignore_eos": True}}
PATIENT = StallPolicy(quiet_s=PATIENCE_S, computing_s=PATIENCE_S)
STRICT = StallPolicy(quiet_s=0.5, computing_s=0.5)


@pytest.fixture(params=["m-prefill", "m-decode"])
async def service(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AnyService]:
    """A service behind HTTP whose engine is given time, until a test has blocked it."""
    async with serving(tmp_path, request.param) as one:
        one.progress.policy = PATIENT
        server = _Server(one, build(one, Tokens(TOKEN), StreamTimes(cleanup_s=0.2)), ENCRYPTION)
        running = asyncio.ensure_future(server.serve([listener_of(one.host)]))
        watching = asyncio.ensure_future(Monitor(one, tick_s=0.05).run())
        while not server.started:
            await asyncio.sleep(0)
        yield one
        watching.cancel()
        server.should_exit = True
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait((running, watching))


def client(service: AnyService) -> httpx.AsyncClient:
    headers, url = {"Authorization": f"Bearer {TOKEN}"}, service.host.url
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False, verify=False)


async def hang_after_the_next_step(service: AnyService, goes_on: threading.Event) -> None:
    """Block the engine's thread, inside a piece of its work, until `goes_on`. Returns once it is blocked."""
    hangs = threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait()

    if service.role == "decode":
        service.engine.on_beat = hang
    else:
        of_type(service, PrefillService).scheduler.on_beat = hang
    assert await asyncio.to_thread(hangs.wait, PATIENCE_S)


async def until(service: AnyService, status: str) -> None:
    async with asyncio.timeout(PATIENCE_S), client(service) as caller:
        while (await caller.get("/health")).json()["status"] != status:
            await asyncio.sleep(0.05)


async def test_callers_of_an_engine_that_hangs_in_a_step_get_an_error_and_it_may_come_back(service: AnyService) -> None:
    goes_on = threading.Event()
    try:
        async with client(service) as caller, caller.stream("POST", "/generate", json=LONG) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "event: tokens"
            await hang_after_the_next_step(service, goes_on)
            service.progress.policy = STRICT
            rest = [line async for line in lines]
        assert "event: error" in rest and "has made no progress" in "".join(rest)
        await until(service, "stalled")
        async with client(service) as caller:
            refused = await caller.post("/generate", json=LONG)
        assert refused.status_code == httpx.codes.BAD_GATEWAY and "no progress" in refused.text
    finally:
        service.progress.policy = PATIENT
        goes_on.set()
    service.progress.beat()
    await until(service, "ok")
    async with asyncio.timeout(PATIENCE_S):
        while service.active or unfinished() or not idle(service):
            await asyncio.sleep(0.02)
    assert service.status().counters.failed == 1


async def test_a_lease_that_is_not_extended_ends_its_request_within_a_tick(
    service: AnyService,
) -> None:
    async with client(service) as caller, caller.stream("POST", "/generate", json={**LONG, "lease_s": 0.3}) as answer:
        rest = [line async for line in answer.aiter_lines()]
    last = json.loads([line for line in rest if line][-1].removeprefix("data: "))
    assert last.get("error", last)["code"] == "Cancelled"  # it has a status of its own if nothing was sent before
    async with asyncio.timeout(PATIENCE_S):
        while service.active:
            await asyncio.sleep(0.02)
    assert service.status().counters.cancelled == 1


PROGRAM = """
import asyncio, sys, time
from functools import partial
from disagg.servers import __main__, monitor, run
from disagg.servers.decode import service as decode
monitor.WATCH_S, run.Monitor = 0.2, partial(run.Monitor, tick_s=0.05)
{limits}
load = decode.DecodeService.load

async def broken(self):
    await load(self)
    {breaks}

decode.DecodeService.load = broken
sys.exit(__main__.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("limits", "breaks", "reason"),
    [
        ("monitor.DEAD_S = 0.5", "type(self).engine_alive = False", "its thread has ended"),
        (
            "monitor.STUCK_S, monitor.WATCH_S = 0.5, 2.0",
            "self.engine_health.tested(TimeoutError(), time.monotonic() + 1e6)",
            "its self-test failed",
        ),
        (
            "monitor.STUCK_S = 0.5",
            "asyncio.get_running_loop().call_later(0.1, time.sleep, 60)",
            "the event loop of m-decode has not run",
        ),
    ],
    ids=["a dead engine", "an engine that does not work", "a stuck event loop"],
)
def test_a_server_that_cannot_serve_again_ends_itself_and_says_why(
    tmp_path: Path, limits: str, breaks: str, reason: str
) -> None:
    """limits: those that are short. If others were, too, a slow machine would often have a stuck event loop first."""
    config, token = write_simulated(tmp_path), tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    code = PROGRAM.format(limits=limits, breaks=breaks)
    ended = subprocess.run(
        [sys.executable, "-c", code, "--config", str(config), "--host", "m-decode"],
        env={**os.environ, "PYTHONPATH": str(ROOT), TOKEN_FILE_VARIABLE: str(token)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == EXIT_CODE, ended.stderr
    (line,) = (json.loads(line) for line in ended.stderr.splitlines() if '"event": "watchdog"' in line)
    assert reason in line["message"] and line["message"].endswith(f"so the server ends with code {EXIT_CODE}")
    assert "most recent call first" in ended.stderr, "the traces of its threads"
