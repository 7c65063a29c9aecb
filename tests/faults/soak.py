"""Many short requests, a tenth of them aborted: does a server's memory grow?"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from disagg.errors import DisaggError
from disagg.inference.client import AsyncClient
from tests.faults.fleet import MODEL, FaultFleet
from tests.faults.process import Held

ALLOWED_GROWTH: Final = 1.02
MAX_KV_BYTES: Final = 8 << 20  # of a host: KV of finished requests fills it before the first measurement
TIMEOUT_S: Final = 60.0
SETTLE_S: Final = 2.0
"""A decode host trims its memory a second after its last request."""
SETTLE_READINGS: Final = 10


@dataclass(frozen=True, slots=True)
class Settings:
    """requests: in all. early: after so many, memory is measured, and again after as many more. aborted: share of
    requests."""

    requests: int = 20_000
    early: int = 2_000
    concurrency: int = 8
    aborted: float = 0.1
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """What each server had open after each part of the requests, by the number of requests so far. failed: messages of
    requests that failed. left: what is held at the end and was not early."""

    curve: Mapping[int, Mapping[str, Held]]
    aborted: int
    failed: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def early(self) -> Mapping[str, Held]:
        return self.curve[min(self.curve)]

    @property
    def late(self) -> Mapping[str, Held]:
        return self.curve[max(self.curve)]

    @property
    def problems(self) -> list[str]:
        grown = [
            f"{name}: {self.growth(name):.3f} times the memory"
            for name in self.early
            if self.growth(name) > ALLOWED_GROWTH
        ]
        return [*grown, *self.failed, *self.left]

    def growth(self, name: str) -> float:
        return self.late[name].resident / self.early[name].resident


async def run(fleet: FaultFleet, settings: Settings, tell: Callable[[str], None] = lambda _: None) -> Report:
    """Raises nothing for a request that fails: the report has its message. tell: gets a line after each part."""
    chance = random.Random(settings.seed)
    before, failed, aborted = fleet.held(), [], 0
    curve: dict[int, Mapping[str, Held]] = {}

    async def caller(client: AsyncClient, numbers: list[int]) -> None:
        nonlocal aborted
        while numbers:
            number = numbers.pop()
            abort_s = chance.uniform(0.0, 0.1) if chance.random() < settings.aborted else None
            tokens = [10 + (number * 31 + n) % 600 for n in range(chance.randint(8, 64))]
            request = asyncio.ensure_future(
                client.generate(MODEL, tokens=tokens, max_tokens=8, ignore_eos=True, timeout=TIMEOUT_S)
            )
            _, running = await asyncio.wait((request,), timeout=abort_s)
            if running:
                aborted += 1
                request.cancel()
                await asyncio.wait((request,))
            elif isinstance(error := request.exception(), DisaggError):
                failed.append(f"{error.code()}: {error}")

    async def part(first: int, last: int) -> Mapping[str, Held]:
        numbers = list(range(last, first, -1))
        async with fleet.client() as client:
            await asyncio.gather(*(caller(client, numbers) for _ in range(settings.concurrency)))
        await asyncio.to_thread(fleet.wait_idle, curve[min(curve)] if curve else before)
        return await settled(fleet.held)

    for first in range(0, settings.requests, settings.early):
        last = min(first + settings.early, settings.requests)
        curve[last] = await part(first, last)
        tell(row(last, curve[last]))
    left = await asyncio.to_thread(fleet.left_over, curve[min(curve)])
    return Report(curve, aborted, tuple(failed), tuple(left))


async def settled(
    held: Callable[[], Mapping[str, Held]], pause: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> Mapping[str, Held]:
    """What is held once no server's memory shrinks any more, or after SETTLE_READINGS."""
    now = held()
    for _ in range(SETTLE_READINGS):
        await pause(SETTLE_S)
        before, now = now, held()
        if all(now[name].resident >= one.resident for name, one in before.items()):
            break
    return now


def row(requests: int, held: Mapping[str, Held]) -> str:
    """What each server has open after so many requests: memory, threads, sockets, files."""
    return f"{requests:6d}  " + "  ".join(
        f"{name} {one.resident / 1e6:.1f} MB {one.thread_count}/{one.sockets}/{one.files}" for name, one in held.items()
    )


def table(report: Report) -> list[str]:
    lines = [f"{report.aborted} aborted, {len(report.failed)} failed"]
    for name, early in report.early.items():
        late = report.late[name]
        lines.append(
            f"{name}: {early.resident / 1e6:.1f} -> {late.resident / 1e6:.1f} MB ({report.growth(name) - 1:+.1%}), "
            f"{early.thread_count} -> {late.thread_count} threads, {early.sockets} -> {late.sockets} sockets"
        )
    lines += [row(number, held) for number, held in report.curve.items()]
    return lines + [f"  problem: {problem}" for problem in report.problems[:20]]
