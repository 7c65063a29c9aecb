"""Prefill hosts that are killed while they compute the head of a split: how many tokens are computed again."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from disagg.inference.client import AsyncClient
from disagg.inference.types import Stage
from tests.faults import process
from tests.faults.chaos import lost_tokens, quantiles
from tests.faults.fleet import MODEL, FaultFleet


@dataclass(frozen=True, slots=True)
class Settings:
    """times: prompts, each with a head that is killed. tokens: of one. split: layers of a head. seed: of prompts and
    moments."""

    times: int = 40
    tokens: int = 4000
    split: int = 2
    seed: int = 1


@dataclass(slots=True)
class Report:
    """In tokens. whole: those of whole chunks, with which the decode host went on. lost: those that had come of the
    next chunk, see `lost_tokens`. early: heads that were killed before a chunk was whole, so that the request began
    anew. late: heads that had ended. wrong: answers that were not exact."""

    whole: list[int] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    early: int = 0
    late: int = 0
    wrong: int = 0


async def run(fleet: FaultFleet, settings: Settings) -> Report:
    report, chance = Report(), random.Random(settings.seed)
    for _ in range(settings.times):
        tokens = [chance.randrange(10, 600) for _ in range(settings.tokens)]
        async with fleet.client() as client:  # a new one, to which the host that was killed last is as any other
            await _one(fleet, client, tokens, settings.split, chance.random(), report)
    return report


async def _one(
    fleet: FaultFleet, client: AsyncClient, tokens: Sequence[int], split: int, moment: float, report: Report
) -> None:
    """moment: of the head's time, at which it is killed."""
    killed: list[str] = []
    timers: list[asyncio.TimerHandle] = []
    before = _lost(fleet)

    def ask(**options: Any) -> Any:
        salt = secrets.token_hex(8)
        return client.generate(MODEL, tokens=tokens, max_tokens=8, split=split, cache_salt=salt, **options)

    def kill(host: str) -> None:
        if not killed:
            killed.append(host)
            process.kill(fleet.pid(host))

    def watch(stage: Stage) -> None:
        if stage.phase == "prefill" and stage.prefill_server is not None:
            loop = asyncio.get_running_loop()
            after = moment * expected.metrics.ttft_parts.prefill
            timers.append(loop.call_later(after, kill, stage.prefill_server))

    expected = await ask()
    got = await ask(watch=watch)
    for timer in timers:  # of a head that had ended
        timer.cancel()
    whole, lost = got.metrics.resumed_at, sum(_lost(fleet)) - sum(before)
    if [token.id for token in got.tokens] != [token.id for token in expected.tokens]:
        report.wrong += 1
    if whole is not None:
        report.whole.append(whole)
        report.lost.append(lost)
    elif got.warnings:
        report.early += 1
    else:
        report.late += 1
    await asyncio.to_thread(fleet.restart, *killed)


def _lost(fleet: FaultFleet) -> Sequence[float]:
    names = fleet.names("decode")
    return [tokens for name in names for tokens in lost_tokens(fleet.servers[name].log(name))]


def table(report: Report) -> list[str]:
    """The report as lines of text."""
    return [
        f"{len(report.whole)} heads were killed after a whole chunk, {report.early} before, {report.late} had ended",
        f"answers that were not exact: {report.wrong}",
        f"tokens of whole chunks, none computed again, p50, p90, max: {quantiles(report.whole)}",
        f"tokens that had come of the next chunk and are computed again: {quantiles(report.lost)}",
    ]
