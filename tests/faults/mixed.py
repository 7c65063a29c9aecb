"""Short requests beside a long one: how long do they wait for their first token?"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from disagg.inference.client import AsyncClient
from tests.faults.fleet import MODEL, FaultFleet

ALLOWED: Final = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """long_tokens, short_tokens: of the prompts. apart_s: from one short request to the next. rounds: of each kind."""

    long_tokens: int = 8000
    short_tokens: int = 60
    short: int = 16
    apart_s: float = 0.05
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Report:
    """TTFT of the short requests in seconds, without and with the long one, and that of each long one."""

    without: Sequence[float]
    behind: Sequence[float]
    long: Sequence[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.behind) / statistics.median(self.without)


async def run(fleet: FaultFleet, settings: Settings) -> Report:
    """All rounds, alternating."""
    without: list[float] = []
    behind: list[float] = []
    long: list[float] = []
    async with fleet.client() as client:
        await client.generate(MODEL, tokens=_prompt(settings.long_tokens, 0), max_tokens=2)
        for number in range(1, settings.rounds + 1):
            without += await _short(client, settings, 100 * number)
            first = asyncio.ensure_future(_ttft(client, _prompt(settings.long_tokens, number)))
            await asyncio.sleep(settings.apart_s)
            behind += await _short(client, settings, 100 * number + 50)
            long.append(await first)
    return Report(without, behind, long)


async def _short(client: AsyncClient, settings: Settings, seed: int) -> list[float]:
    async def one(number: int) -> float:
        await asyncio.sleep(number * settings.apart_s)
        return await _ttft(client, _prompt(settings.short_tokens, seed + number))

    return await asyncio.gather(*(one(number) for number in range(settings.short)))


async def _ttft(client: AsyncClient, tokens: list[int]) -> float:
    return (await client.generate(MODEL, tokens=tokens, max_tokens=4, ignore_eos=True)).metrics.ttft


def _prompt(length: int, seed: int) -> list[int]:
    """A prompt that shares no beginning with those of other seeds."""
    return [10 + (seed * 131 + n * (7 + seed % 13)) % 600 for n in range(length)]


def table(report: Report) -> list[str]:
    return [
        f"{len(report.without)} short requests alone: TTFT p50 {statistics.median(report.without):.3f} s",
        f"{len(report.behind)} beside a long one:     TTFT p50 {statistics.median(report.behind):.3f} s, "
        f"{report.ratio:.2f} times (at most {ALLOWED:g})",
        f"the long ones: TTFT {', '.join(f'{seconds:.2f}' for seconds in report.long)} s",
    ]
