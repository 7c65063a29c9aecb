"""The sweep as a list of turns: which mode runs which requests at which load, and when each is sent. Pure.

Modes alternate (A B C A B C ...), so that warming up, throttling and disturbances affect all of them alike. A turn ends
before the next begins: no mode loads the machines of another.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from disagg.bench import Mode


@dataclass(frozen=True, slots=True)
class ArrivalPattern:
    """How requests arrive: `concurrency` at a time, `rate` per second, or if neither is set at the workload's times."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def label(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} req/s"
        return "trace times" if self.concurrency is None else f"concurrency {self.concurrency}"

    @property
    def short(self) -> str:
        """A label for plots: c4, 2/s, trace."""
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return "trace" if self.concurrency is None else f"c{self.concurrency}"


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of the sweep. A token count is None if each item of the workload has its own."""

    prompt_tokens: int | None
    output_tokens: int | None
    load: ArrivalPattern

    @property
    def work(self) -> int:
        """Tokens of one request, counts that are None left out; at least 1."""
        return (self.prompt_tokens or 0) + (self.output_tokens or 0) or 1

    @property
    def label(self) -> str:
        prompt = "own" if self.prompt_tokens is None else f"{self.prompt_tokens:,}"
        output = "own" if self.output_tokens is None else f"{self.output_tokens:,}"
        return f"prompt {prompt} · output {output} · {self.load.label}"


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A run. requests: per mode and point. rounds: turns that they are spread over. warmup: unmeasured requests per
    mode and point. burstiness: shape of the gamma distribution of gaps, 1 = Poisson arrivals. beside: answers that the
    decode machine writes meanwhile."""

    points: tuple[Point, ...]
    modes: tuple[Mode, ...]
    requests: int
    rounds: int
    warmup: int = 1
    burstiness: float = 1.0
    seed: int = 0
    beside: int = 0

    @property
    def total(self) -> int:
        """Requests of the whole run."""
        return len(self.points) * len(self.modes) * (self.requests + self.warmup)

    @property
    def work(self) -> int:
        """Tokens of the whole run, counts that are None left out."""
        return sum(point.work for point in self.points) * len(self.modes) * (self.requests + self.warmup)


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """A turn: requests `first` .. `first + count - 1` of one mode at one point of the sweep. Modes take turns, so that
    slow changes of the machines affect all of them. offsets: seconds from the start of the turn at which each request
    is due; empty: as soon as another one ends."""

    point: int
    mode: Mode
    first: int
    count: int
    warmup: bool = False
    offsets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestSpeed:
    """One measured request: seconds to its first token and per output token after it, and its token counts."""

    ttft_s: float
    prompt_tokens: int
    per_token_s: float
    output_tokens: int

    def seconds(self, point: Point) -> float:
        """Expected seconds of a request at this point, if the time to the first token is proportional to the prompt."""
        prompt = self.prompt_tokens if point.prompt_tokens is None else point.prompt_tokens
        output = self.output_tokens if point.output_tokens is None else point.output_tokens
        return self.ttft_s * prompt / max(1, self.prompt_tokens) + self.per_token_s * max(0, output - 1)


def expected_seconds(plan: BenchPlan, speeds: Mapping[Mode, RequestSpeed], times: Sequence[float] = ()) -> float:
    """Expected seconds of the whole run. Concurrent requests are taken to run as fast as a single one."""
    total = 0.0
    for turn in turns(plan, times):
        point = plan.points[turn.point]
        each = speeds[turn.mode].seconds(point)
        waves = 1 if turn.offsets else math.ceil(turn.count / (point.load.concurrency or 1))
        total += (turn.offsets[-1] if turn.offsets else 0.0) + waves * each
    return total


def turns(plan: BenchPlan, times: Sequence[float] = ()) -> Iterator[BenchTurn]:
    """The run in order. times: the workload's arrival times in seconds, for a load that states none."""
    for number, point in enumerate(plan.points):
        if plan.warmup:
            for mode in plan.modes:
                yield BenchTurn(number, mode, plan.requests, plan.warmup, warmup=True)
        due = arrival_times(plan, point.load, times)
        for first, count in _slices(plan.requests, _rounds(plan, point.load)):
            offsets = _slice_offsets(due, first, count)
            for mode in plan.modes:
                yield BenchTurn(number, mode, first, count, offsets=offsets)


def arrival_times(plan: BenchPlan, load: ArrivalPattern, times: Sequence[float] = ()) -> list[float]:
    """The seconds at which each request of a point is due; empty for a load with a concurrency.

    They are the same for every mode, and their mean rate is exactly the stated one.
    """
    if load.concurrency is not None:
        return []
    if load.rate is None:
        return [time - times[0] for time in times[: plan.requests]]
    dice = random.Random(f"{plan.seed}/arrivals/{load.rate}")
    gaps = [dice.gammavariate(plan.burstiness, 1.0) for _ in range(plan.requests)]
    scale = plan.requests / load.rate / (sum(gaps) or 1.0)
    return list(itertools.accumulate(gap * scale for gap in gaps))


def _rounds(plan: BenchPlan, load: ArrivalPattern) -> int:
    """Turns per point: one per request at concurrency 1, else few enough that each turn reaches its load."""
    if load.concurrency == 1:
        return plan.requests
    return max(1, min(plan.rounds, plan.requests // (2 * (load.concurrency or 1))))


def _slices(count: int, rounds: int) -> Iterator[tuple[int, int]]:
    bounds = [math.floor(count * edge / rounds) for edge in range(rounds + 1)]
    for begin, end in itertools.pairwise(bounds):
        yield begin, end - begin


def _slice_offsets(due: Sequence[float], first: int, count: int) -> tuple[float, ...]:
    """Due times within one turn, with the gap before its first request."""
    begin = due[first - 1] if due and first else 0.0
    return tuple(time - begin for time in due[first : first + count])
