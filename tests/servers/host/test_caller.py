"""What the caller of a request is told while its host works on it."""

from __future__ import annotations

import asyncio

import pytest

from disagg.servers.host.request import STATE_S, Caller


@pytest.mark.parametrize(("stated", "told"), [("queued", 1), ("", 0), ("generating", 0), ("waiting for KV", 0)])
async def test_a_caller_that_was_told_that_its_request_waits_is_told_when_it_begins(stated: str, told: int) -> None:
    sent = list[str]()

    async def progress() -> None:
        sent.append("progress")

    caller = Caller("r", progress)
    caller.stated = stated
    await caller.state_begin()
    assert len(sent) == told


async def test_a_caller_that_reads_nothing_delays_its_request_for_a_moment_only() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    caller = Caller("r", stuck)
    caller.stated = "queued"
    async with asyncio.timeout(100 * STATE_S):
        await caller.state_begin()
