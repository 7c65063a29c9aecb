"""Plays the turns of a plan against a fleet.

A request that fails is a Record with its kind of error; it is never sent again and never dropped. Stopping the run
ends what is under way and keeps everything that had ended before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.bench.plan import Load, Plan, Turn, turns
from disagg.bench.records import ALONE, WRONG_COUNT, Mode, Record, TurnResult
from disagg.bench.workloads import Item, Workload
from disagg.errors import DisaggError
from disagg.inference.stream import AsyncStream
from disagg.inference.types import Completion

Stream = Callable[..., AsyncStream]
"""AsyncClient.stream, or what behaves like it."""


@dataclass(slots=True)
class RunMonitor:
    """The run as seen from outside while it goes on; `changed` is called after each request.

    `end` stops it, for a reason. `work` counts tokens of the requests that ended: requests differ in length by far
    more than they do in speed per token, so that time remaining is told from it.
    """

    changed: Callable[[], None] = lambda: None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    total_work: int = 0
    work: int = 0
    done: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    doing: str = ""

    def end(self, reason: str) -> None:
        """Stop the run; the first reason stays."""
        self.reason = self.reason or reason
        self.stop.set()

    def ended(self, record: Record, work: int) -> None:
        self.done += 1
        self.work += work
        if record.error:
            self.failures[record.error] += 1
        self.changed()


async def run(
    stream: Stream, model: str, plan: Plan, workload: Workload, monitor: RunMonitor, *, timeout: float
) -> list[TurnResult]:
    """Run the turns in order. Returns those that began; the last may be incomplete. `timeout`: seconds per request."""
    began, turn_results = time.monotonic(), list[TurnResult]()
    monitor.total_work = plan.work
    for turn in turns(plan, workload.times):
        if monitor.stop.is_set():
            break
        point = plan.points[turn.point]
        monitor.doing = f"{'warming up ' if turn.warmup else ''}{turn.mode} · {point.label}"
        monitor.changed()
        # Prompts are made before the clock starts: making one of 32k tokens takes milliseconds.
        indices = range(turn.first, turn.first + turn.count)
        items = [workload.item(point, turn.mode, index) for index in indices]
        ask = _RequestSender(stream, model, turn.mode, timeout, began, monitor, point.work)
        turn_results.append(await _run_turn(turn, items, point.load, ask))
    return turn_results


@dataclass(slots=True)
class _RequestSender:
    """Sends one request and makes its Record."""

    stream: Stream
    model: str
    mode: Mode
    timeout: float
    run_began: float
    monitor: RunMonitor
    work: int

    async def __call__(self, index: int, due: float, item: Item) -> Record:
        record, gaps = Record(index, due - self.run_began, time.monotonic() - self.run_began), list[float]()
        try:
            record = _answered(record, item, await self._collect(item, gaps), gaps)
        except DisaggError as error:
            record = replace(record, error=error.code(), message=error.message)
        self.monitor.ended(record, self.work)
        return record

    async def _collect(self, item: Item, gaps: list[float]) -> Completion:
        """The whole answer; `gaps` gets the time from each token to the next."""
        request: dict[str, Any] = {**item.request(), "alone": ALONE[self.mode], "timeout": self.timeout}
        before = 0.0
        async with self.stream(self.model, **request) as chunks:
            async for chunk in chunks:
                for _ in chunk.tokens:
                    if before:
                        gaps.append(chunk.arrived - before)
                    before = chunk.arrived
        return chunks.completion


def _answered(record: Record, item: Item, completion: Completion, gaps: Sequence[float]) -> Record:
    """The record of an answer; a failure where the token counts are not those asked for, since no figure would hold."""
    metrics = completion.metrics
    wanted = (len(item.tokens) if item.tokens is not None else metrics.prompt_tokens, item.output_tokens)
    if (metrics.prompt_tokens, metrics.completion_tokens) != wanted:
        got = f"{metrics.prompt_tokens} prompt and {metrics.completion_tokens} output tokens"
        return replace(record, error=WRONG_COUNT, message=f"{got} instead of {wanted[0]} and {wanted[1]}")
    return replace(record, metrics=metrics, itl=tuple(gaps))


async def _run_turn(turn: Turn, items: Sequence[Item], load: Load, ask: _RequestSender) -> TurnResult:
    """One turn, until all its requests have ended or the run is stopped."""
    began = time.monotonic()
    queue = iter(list(enumerate(items)))
    started: list[asyncio.Task[Record]] = []

    def start(number: int, item: Item, due: float) -> asyncio.Task[Record]:
        started.append(asyncio.ensure_future(ask(turn.first + number, due, item)))
        return started[-1]

    async def one_after_another(mine: Iterator[tuple[int, Item]]) -> None:
        for number, item in mine:
            await start(number, item, time.monotonic())

    async def when_due() -> None:
        for number, item in queue:
            due = began + turn.offsets[number]
            await asyncio.sleep(due - time.monotonic())
            start(number, item, due)
        await asyncio.gather(*started)

    places = min(load.concurrency or 1, len(items))
    parts = [when_due()] if turn.offsets else [one_after_another(queue) for _ in range(places)]
    await _until_done_or_stopped([asyncio.ensure_future(part) for part in parts], started, ask.monitor.stop)
    records = tuple(task.result() for task in started if not task.cancelled())
    return TurnResult(
        point=turn.point,
        mode=turn.mode,
        warmup=turn.warmup,
        began=began,
        ended=time.monotonic(),
        records=records,
        unfinished=len(started) - len(records),
    )


async def _until_done_or_stopped(
    parts: Sequence[asyncio.Task[None]], started: Sequence[asyncio.Task[Record]], stop: asyncio.Event
) -> None:
    """Wait for all parts; where the run is stopped first, or this is cancelled, end them and all they started."""
    stopped = asyncio.ensure_future(stop.wait())
    pending: set[asyncio.Task[Any]] = set(parts)
    try:
        while pending and not stopped.done():
            done, _ = await asyncio.wait({*pending, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending & done:
                task.result()
            pending -= done
    finally:
        everything: set[asyncio.Task[Any]] = {stopped, *parts, *started}
        for task in everything:
            task.cancel()
        await asyncio.wait(everything)
