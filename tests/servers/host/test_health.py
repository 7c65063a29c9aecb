"""disagg/servers/host/health.py: when an engine counts as broken, when it is tested, what makes it well again."""

from __future__ import annotations

import asyncio

import pytest

from disagg.errors import (
    Cancelled,
    CapabilityMissing,
    DeadlineExceeded,
    ModelError,
    Overloaded,
    PeerLost,
    RequestError,
)
from disagg.servers.host.health import FAILURES_IN_A_ROW, FAULT_TEST_S, IDLE_TEST_S, EngineHealth

NAN, BUG = ModelError("NaN"), ZeroDivisionError()


@pytest.mark.parametrize(
    ("ends", "works"),
    [
        ([BUG] * FAILURES_IN_A_ROW, False),
        ([NAN, BUG, MemoryError()], False),
        ([NAN] * (FAILURES_IN_A_ROW - 1), True),
        ([NAN, NAN, None, NAN, NAN], True),
        ([NAN, NAN, Cancelled("left"), NAN], False),
        ([PeerLost("x"), RequestError("x"), Overloaded("x"), DeadlineExceeded("x")] * 3, True),
        ([CapabilityMissing("x")] * 3, True),
        ([asyncio.CancelledError(), GeneratorExit()] * 3, True),
    ],
    ids=[
        "bugs",
        "of any kind",
        "too few",
        "an answer between",
        "a cancellation between",
        "errors of others",
        "what the host lacks",
        "cancelled",
    ],
)
def test_only_errors_of_the_engine_in_a_row_are_its_fault(ends: list[BaseException | None], works: bool) -> None:
    health = EngineHealth(0.0)
    for error in ends:
        health.request_ended(error, 1.0)
    assert (not health.fault) is works


def broken() -> EngineHealth:
    health = EngineHealth(0.0)
    for _ in range(FAILURES_IN_A_ROW):
        health.request_ended(NAN, 1.0)
    return health


def test_a_fault_lasts_until_a_self_test_passes() -> None:
    health = broken()
    assert health.fault == "its last 3 requests failed in the engine: NaN"
    health.request_ended(None, 2.0)
    assert health.fault
    health.tested(TimeoutError("no answer within 10 s"), 3.0)
    assert health.fault == "its self-test failed: no answer within 10 s"
    health.tested(None, 4.0)
    assert not health.fault


def test_an_idle_engine_is_tested_now_and_then() -> None:
    health = EngineHealth(0.0)
    assert not health.test_due(IDLE_TEST_S - 1, busy=False)
    assert health.test_due(IDLE_TEST_S, busy=False) and not health.test_due(IDLE_TEST_S, busy=True)
    health.request_ended(None, 50.0)
    assert not health.test_due(IDLE_TEST_S, busy=False) and health.test_due(50.0 + IDLE_TEST_S, busy=False)
    health.tested(None, 200.0)
    assert not health.test_due(201.0, busy=False)


def test_a_broken_engine_is_tested_at_once_and_then_often() -> None:
    health = broken()
    assert health.test_due(1.0, busy=True)
    health.tested(NAN, 2.0)
    assert not health.test_due(3.0, busy=False) and health.test_due(2.0 + FAULT_TEST_S, busy=False)


def test_a_dead_engine_is_not_tested() -> None:
    health = EngineHealth(0.0)
    health.died()
    assert health.fault == "its thread has ended" and not health.test_due(1e6, busy=False)
    health.died("a worker has ended")
    assert health.fault == "a worker has ended"
