"""disagg/servers/monitor.py with simulated engines: stalls, self-tests, engines that fail or die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from disagg.api.requests import DecodeBody, GenerateBody
from disagg.api.sampling import Sampling
from disagg.errors import ModelError, ServerUnavailable
from disagg.servers.host.health import IDLE_TEST_S, TEST_LIMIT_S, StallPolicy
from disagg.servers.host.request import Caller
from disagg.servers.host.service import AnyService
from disagg.servers.monitor import DEAD_S, Monitor, Problems
from tests.servers.host.test_service import answer, serving
from tests.values import present

PATIENCE_S = 60.0
GENERATE = GenerateBody(model="m", prompt="hello", sampling=Sampling(max_tokens=3))


@pytest.fixture(params=["m-prefill", "m-decode"])
async def service(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AnyService]:
    async with serving(tmp_path, request.param) as one:
        yield one


@pytest.fixture
async def decode(tmp_path: Path) -> AsyncIterator[AnyService]:
    async with serving(tmp_path, "m-decode") as one:
        yield one


async def until_tested(monitor: Monitor) -> None:
    """Wait for the end of the running self-test."""
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait((present(monitor.testing),))


async def test_an_idle_engine_proves_that_it_works(service: AnyService) -> None:
    monitor = Monitor(service)
    monitor.tick(time.monotonic())
    assert monitor.testing is None, "it has just been loaded"
    monitor.tick(time.monotonic() + IDLE_TEST_S)
    await until_tested(monitor)
    assert service.health().status == "ok" and service.status().running == 0


async def test_an_engine_that_does_not_answer_its_self_test_is_unhealthy_until_it_does(
    service: AnyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, probe = Monitor(service), service.probe_engine
    monkeypatch.setattr(type(service), "test_limit_s", 0.01)
    monkeypatch.setattr(service, "probe_engine", asyncio.Event().wait)
    monitor.tick(time.monotonic() + IDLE_TEST_S)
    await until_tested(monitor)
    assert service.load_figures().status == "error" and "no answer within 0.01 s" in service.problem
    with pytest.raises(ServerUnavailable, match="does not work"):
        await anext(answer(service, "/generate", GENERATE))
    monkeypatch.setattr(service, "probe_engine", probe)
    monkeypatch.setattr(type(service), "test_limit_s", PATIENCE_S)
    monitor.tick(time.monotonic() + IDLE_TEST_S)
    await until_tested(monitor)
    assert service.load_figures().status == "ok"


async def test_an_engine_may_state_how_long_its_self_test_takes(
    service: AnyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert service.test_limit_s == TEST_LIMIT_S
    if service.role == "prefill":
        monkeypatch.setattr(service.engine, "test_limit_s", 60.0)
        assert service.test_limit_s == 60.0


async def test_a_host_whose_engine_fails_every_request_reports_an_error_until_a_self_test_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_answer(*_: Any, **__: Any) -> None:
        raise ModelError("NaN")

    async with serving(tmp_path, "m-prefill") as prefill:
        monkeypatch.setattr(prefill.engine, "start_answer", start_answer)
        for _ in range(3):
            assert prefill.health().status == "ok"
            with pytest.raises(ModelError):
                await anext(answer(prefill, "/generate", GENERATE))
        assert prefill.health().status == "error"
        monitor = Monitor(prefill)
        monitor.tick(time.monotonic())
        await until_tested(monitor)
        assert prefill.health().status == "ok"


async def test_requests_of_a_stalled_engine_end_with_an_error_and_new_ones_are_refused(
    decode: AnyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, caller = Monitor(decode), Caller("the-request")
    events = answer(decode, "/decode", DecodeBody(model="m", prompt="hello"), caller)
    await anext(events)
    monkeypatch.setattr(type(decode), "busy", True)
    now = time.monotonic()
    most = int(StallPolicy().computing_s) + 2
    for second in range(most):
        monitor.tick(now + second)
    assert isinstance(caller.error, ServerUnavailable) and "has made no progress for " in caller.error.message
    await events.aclose()
    assert present(decode.status().last_error).code == "ServerUnavailable"
    assert decode.load_figures().status == "stalled"
    with pytest.raises(ServerUnavailable, match="no progress"):
        await anext(answer(decode, "/generate", GENERATE))
    decode.progress.beat()
    monkeypatch.setattr(type(decode), "busy", False)
    monitor.tick(now + most)
    assert decode.load_figures().status == "ok"


async def test_a_stopped_process_that_goes_on_is_not_stalled(
    decode: AnyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = Monitor(decode)
    monkeypatch.setattr(type(decode), "busy", True)
    now = time.monotonic()
    monitor.tick(now)
    monitor.tick(now + 3600)
    assert decode.health().status == "ok"


async def test_requests_of_a_dead_engine_end_and_the_watchdog_is_told(
    decode: AnyService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, caller = Monitor(decode), Caller("the-request")
    problems = Problems(decode, monitor)
    events = answer(decode, "/decode", DecodeBody(model="m", prompt="hello"), caller)
    await anext(events)
    monkeypatch.setattr(type(decode), "engine_alive", False)
    monitor.tick(time.monotonic())
    assert isinstance(caller.error, ServerUnavailable) and decode.health().status == "error"
    assert problems() == ("the engine of m-decode does not work: its thread has ended", DEAD_S)
    await events.aclose()


async def test_an_event_loop_that_does_not_run_is_a_problem(decode: AnyService) -> None:
    monitor = Monitor(decode)
    problems = Problems(decode, monitor)
    texts = [problems().text]
    texts.append(problems().text)
    monitor.tick(time.monotonic())
    texts.append(problems().text)
    assert texts == ["", "the event loop of m-decode has not run", ""]
