"""The sweep as a list of turns: which mode runs which requests at which load, and when each is sent. Pure.

Modes take turns (A B C A B C ...) so that a machine that warms up, throttles or is disturbed meets all of them alike.
A turn ends before the next begins: modes never load each other's machines.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from disagg.bench.records import Mode

MAX_REQUESTS = 100_000


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are offered: `concurrency` at a time, or `rate` per second whatever is still under way.

    Neither: at the times that the workload states.
    """

    concurrency: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} req/s"
        return "trace times" if self.concurrency is None else f"concurrency {self.concurrency}"

    @property
    def short(self) -> str:
        """For plots: c4, 2/s, trace."""
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return "trace" if self.concurrency is None else f"c{self.concurrency}"


@dataclass(frozen=True, slots=True)
class Point:
    """One place of the sweep. A token count is None where each item of the workload has its own."""

    prompt_tokens: int | None
    output_tokens: int | None
    load: Load

    @property
    def work(self) -> int:
        """Tokens of one request, as far as the point knows them."""
        return (self.prompt_tokens or 0) + (self.output_tokens or 0) or 1

    @property
    def label(self) -> str:
        prompt = "own" if self.prompt_tokens is None else f"{self.prompt_tokens:,}"
        output = "own" if self.output_tokens is None else f"{self.output_tokens:,}"
        return f"prompt {prompt} · output {output} · {self.load.label}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A run. `requests`: per mode and point; `rounds`: over how many turns they are spread; `warmup`: unmeasured
    requests per mode and point; `burstiness`: shape of the gamma distribution of gaps, 1 = Poisson arrivals."""

    points: tuple[Point, ...]
    modes: tuple[Mode, ...]
    requests: int
    rounds: int
    warmup: int = 1
    burstiness: float = 1.0
    seed: int = 0

    @property
    def total(self) -> int:
        """Requests of the whole run."""
        return len(self.points) * len(self.modes) * (self.requests + self.warmup)

    @property
    def work(self) -> int:
        """Tokens of the whole run, as far as the points know them."""
        return sum(point.work for point in self.points) * len(self.modes) * (self.requests + self.warmup)


@dataclass(frozen=True, slots=True)
class Turn:
    """Requests `first` .. `first + count - 1` of one mode at one point. `offsets`: seconds from the turn's begin to
    when each is due; empty: as soon as one of the concurrent places is free."""

    point: int
    mode: Mode
    first: int
    count: int
    warmup: bool = False
    offsets: tuple[float, ...] = ()


def turns(plan: Plan, times: Sequence[float] = ()) -> Iterator[Turn]:
    """The run in order. `times`: the workload's own arrival times in seconds, where a load has none."""
    for number, point in enumerate(plan.points):
        if plan.warmup:
            for mode in plan.modes:
                yield Turn(number, mode, plan.requests, plan.warmup, warmup=True)
        due = arrival_times(plan, point.load, times)
        for first, count in _slices(plan.requests, _rounds(plan, point.load)):
            offsets = _slice_offsets(due, first, count)
            for mode in plan.modes:
                yield Turn(number, mode, first, count, offsets=offsets)


def arrival_times(plan: Plan, load: Load, times: Sequence[float] = ()) -> list[float]:
    """When each request of a point is due, in seconds; empty for a load of so many at a time.

    The same for every mode, and the mean rate is exactly the stated one.
    """
    if load.concurrency is not None:
        return []
    if load.rate is None:
        return [time - times[0] for time in times[: plan.requests]]
    dice = random.Random(f"{plan.seed}/arrivals/{load.rate}")
    gaps = [dice.gammavariate(plan.burstiness, 1.0) for _ in range(plan.requests)]
    scale = plan.requests / load.rate / (sum(gaps) or 1.0)
    return list(itertools.accumulate(gap * scale for gap in gaps))


def _rounds(plan: Plan, load: Load) -> int:
    """One request at a time: a turn each. Else few enough turns that the load is reached in every one."""
    if load.concurrency == 1:
        return plan.requests
    return max(1, min(plan.rounds, plan.requests // (2 * (load.concurrency or 1))))


def _slices(count: int, rounds: int) -> Iterator[tuple[int, int]]:
    edges = [math.floor(count * edge / rounds) for edge in range(rounds + 1)]
    for begin, end in itertools.pairwise(edges):
        yield begin, end - begin


def _slice_offsets(due: Sequence[float], first: int, count: int) -> tuple[float, ...]:
    """Due times within one turn: the gap before its first request is kept."""
    begin = due[first - 1] if due and first else 0.0
    return tuple(time - begin for time in due[first : first + count])
