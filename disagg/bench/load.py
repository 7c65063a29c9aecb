"""Sends the requests of a plan to a fleet, turn by turn: a turn is the requests of one mode at one point of the sweep.

A failed request is a Record with its kind of error; it is neither sent again nor dropped. Stopping the run cancels the
requests under way and keeps all records so far.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.bench import Mode
from disagg.bench.beside import RunningAnswers
from disagg.bench.plan import ArrivalPattern, BenchPlan, BenchTurn, RequestSpeed, expected_seconds, turns
from disagg.bench.records import ALONE, WRONG_COUNT, Record, TurnResult
from disagg.bench.workloads import Workload, WorkloadItem
from disagg.errors import DisaggError
from disagg.inference.several import OpenStream
from disagg.inference.types import Completion

PROBES = 2
PROBE_TOKENS = 8
"""Requests of each mode that `estimate` sends, and their output tokens."""


@dataclass(slots=True)
class RunMonitor:
    """The state of a run, and the way to stop it (`end`). `changed` is called after each request, `estimated` once
    before the first measured one.

    work, total_work: tokens of the requests that ended, and of all. Requests differ in length far more than in speed
    per token, so that the remaining time follows from tokens.
    """

    changed: Callable[[], None] = lambda: None
    estimated: Callable[[BenchPlan, float | None], None] = lambda plan, seconds: None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    total_work: int = 0
    work: int = 0
    done: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    doing: str = ""

    def end(self, reason: str) -> None:
        """Stop the run. The first reason is kept."""
        self.reason = self.reason or reason
        self.stop.set()

    def ended(self, record: Record, work: int) -> None:
        self.done += 1
        self.work += work
        if record.error:
            self.failures[record.error] += 1
        self.changed()


async def run(
    stream: OpenStream,
    model: str,
    plan: BenchPlan,
    workload: Workload,
    monitor: RunMonitor,
    *,
    timeout: float,
    beside: Callable[[], RunningAnswers] | None = None,
) -> list[TurnResult]:
    """Run the turns in order. Returns those that began; the last may be incomplete. `timeout`: seconds per request.
    beside: the answers that run during each turn."""
    began, turn_results = time.monotonic(), list[TurnResult]()
    monitor.total_work = plan.work
    for turn in turns(plan, workload.times):
        if monitor.stop.is_set():
            break
        point = plan.points[turn.point]
        monitor.doing = f"{'warming up ' if turn.warmup else ''}{turn.mode} · {point.label}"
        monitor.changed()
        # Prompts are made before the clock starts: making one of 32k tokens takes milliseconds.
        # Another point has other requests: somebody else's server may answer repeated ones from its cache. Those of a
        # trace belong to its times.
        first = turn.first + (0 if workload.times else turn.point * (plan.requests + plan.warmup + PROBES))
        indices = range(first, first + turn.count)
        items = [workload.item(point, turn.mode, index) for index in indices]
        send = _RequestSender(stream, model, turn.mode, timeout, began, monitor, point.work)
        if beside is None:
            turn_results.append(await _run_turn(turn, items, point.load, send))
        else:
            turn_results.append(await _run_beside(beside(), turn, items, point.load, send))
    return turn_results


async def estimate(
    stream: OpenStream, model: str, plan: BenchPlan, workload: Workload, monitor: RunMonitor, *, timeout: float
) -> float | None:
    """About how many seconds the run will take, from short requests at its smallest point. None if one of them fails
    or the run is stopped."""
    task = asyncio.ensure_future(_speeds(stream, model, plan, workload, timeout))
    await _until_done_or_stopped([task], [], monitor.stop)
    speeds = None if task.cancelled() else task.result()
    return None if speeds is None else expected_seconds(plan, speeds, workload.times)


async def _speeds(
    stream: OpenStream, model: str, plan: BenchPlan, workload: Workload, timeout: float
) -> dict[Mode, RequestSpeed] | None:
    """The second of two requests per mode; the first one warms the servers up."""
    point, speeds = min(plan.points, key=lambda point: point.work), dict[Mode, RequestSpeed]()
    for mode in plan.modes:
        for index in range(plan.requests + plan.warmup, plan.requests + plan.warmup + PROBES):
            item = workload.item(point, mode, index)
            short = replace(item, output_tokens=min(item.output_tokens, PROBE_TOKENS))
            send = _RequestSender(stream, model, mode, timeout, time.monotonic(), RunMonitor(), 0)
            if (metrics := (await send(index, time.monotonic(), short)).metrics) is None:
                return None
            per_token = (metrics.total_time - metrics.ttft) / max(1, metrics.completion_tokens - 1)
            speeds[mode] = RequestSpeed(metrics.ttft, metrics.prompt_tokens, per_token, item.output_tokens)
    return speeds


@dataclass(slots=True)
class _RequestSender:
    """Sends one request and returns its Record."""

    stream: OpenStream
    model: str
    mode: Mode
    timeout: float
    run_began: float
    monitor: RunMonitor
    work: int

    async def __call__(self, index: int, due: float, item: WorkloadItem) -> Record:
        record, gaps = Record(index, due - self.run_began, time.monotonic() - self.run_began), list[float]()
        try:
            record = _answered(record, item, await self._collect(item, gaps), gaps)
        except DisaggError as error:
            record = replace(record, error=error.code(), message=error.message)
        self.monitor.ended(record, self.work)
        return record

    async def _collect(self, item: WorkloadItem, gaps: list[float]) -> Completion:
        """Read the whole answer; append the time between consecutive tokens to `gaps`. No request uses KV that an
        earlier one has left on the hosts: repeated prompts would measure nothing."""
        apart = {"alone": ALONE[self.mode], "local_prefill": False, "cache_salt": secrets.token_hex(8)}
        if self.mode != "whole":
            apart["split"] = "auto" if self.mode == "split" else "off"
        request: dict[str, Any] = {**item.request(), **apart, "timeout": self.timeout}
        before = 0.0
        async with self.stream(self.model, **request) as chunks:
            async for chunk in chunks:
                for _ in chunk.tokens:
                    if before:
                        gaps.append(chunk.arrived - before)
                    before = chunk.arrived
        return chunks.completion


def _answered(record: Record, item: WorkloadItem, completion: Completion, gaps: Sequence[float]) -> Record:
    """The record of an answer; a failure if it has other token counts than the request asked for."""
    metrics = completion.metrics
    wanted = (len(item.tokens) if item.tokens is not None else metrics.prompt_tokens, item.output_tokens)
    if (metrics.prompt_tokens, metrics.completion_tokens) != wanted:
        got = f"{metrics.prompt_tokens} prompt and {metrics.completion_tokens} output tokens"
        return replace(record, error=WRONG_COUNT, message=f"{got} instead of {wanted[0]} and {wanted[1]}")
    return replace(record, metrics=metrics, itl=tuple(gaps))


async def _run_turn(
    turn: BenchTurn, items: Sequence[WorkloadItem], load: ArrivalPattern, send: _RequestSender
) -> TurnResult:
    """Run one turn until all its requests have ended or the run is stopped."""
    began = time.monotonic()
    queue = iter(list(enumerate(items)))
    started: list[asyncio.Task[Record]] = []

    def start(number: int, item: WorkloadItem, due: float) -> asyncio.Task[Record]:
        started.append(asyncio.ensure_future(send(turn.first + number, due, item)))
        return started[-1]

    async def one_after_another(mine: Iterator[tuple[int, WorkloadItem]]) -> None:
        for number, item in mine:
            await start(number, item, time.monotonic())

    async def when_due() -> None:
        for number, item in queue:
            due = began + turn.offsets[number]
            await asyncio.sleep(due - time.monotonic())
            start(number, item, due)
        await asyncio.gather(*started)

    workers = min(load.concurrency or 1, len(items))
    parts = [when_due()] if turn.offsets else [one_after_another(queue) for _ in range(workers)]
    await _until_done_or_stopped([asyncio.ensure_future(part) for part in parts], started, send.monitor.stop)
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


async def _run_beside(
    answers: RunningAnswers, turn: BenchTurn, items: Sequence[WorkloadItem], load: ArrivalPattern, send: _RequestSender
) -> TurnResult:
    async with answers:
        result = await _run_turn(turn, items, load, send)
        sent = [(send.run_began + record.sent, record.metrics) for record in result.records]
        figures = await answers.figures([(at, at + metrics.ttft) for at, metrics in sent if metrics is not None])
    if (error := answers.failure) is not None:
        send.monitor.failures[error.code()] += 1
    return replace(result, beside=figures)


async def _until_done_or_stopped(
    parts: Sequence[asyncio.Task[Any]], started: Sequence[asyncio.Task[Record]], stop: asyncio.Event
) -> None:
    """Wait for all parts. Cancel them and the requests if the run is stopped first or this task is cancelled."""
    stopped = asyncio.ensure_future(stop.wait())
    pending: set[asyncio.Task[Any]] = set(parts)
    try:
        while pending and not stopped.done():
            done, _ = await asyncio.wait({*pending, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in pending & done:
                task.result()
            pending -= done
    finally:
        remaining: set[asyncio.Task[Any]] = {stopped, *parts, *started}
        for task in remaining:
            task.cancel()
        await asyncio.wait(remaining)
