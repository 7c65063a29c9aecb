"""Answers that run on the decode machine beside the requests that are measured, and what a prompt costs them.

While a prompt is computed, whoever computes it may take time from the answers that the same machine writes. They are
written alone at first, then their tokens are counted while a measured request waits for its own first token.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from disagg.errors import DisaggError, ServerUnavailable
from disagg.inference.several import OpenStream

PROMPT_TOKENS: Final = 16
ANSWER_TOKENS: Final = 2048
"""Of one answer, if the context has room for it; then the next one begins."""
QUIET_TOKENS: Final = 24
"""Tokens of each answer before the first measured request: the pace without one."""
QUIET_S: Final = 60.0
"""How long they are waited for."""

Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class BesideFigures:
    """Seconds per token of the running answers: before and after the measured requests, and while one waits for its
    first token. longest_s: between two tokens of one answer then."""

    quiet_s: float
    during_s: float
    longest_s: float

    @property
    def slowdown(self) -> float:
        return self.during_s / self.quiet_s

    def to_json(self) -> dict[str, float]:
        """In milliseconds."""
        times = {"quiet_tpot_ms": self.quiet_s, "during_tpot_ms": self.during_s, "longest_gap_ms": self.longest_s}
        return {**{name: 1e3 * value for name, value in times.items()}, "slowdown": self.slowdown}


def combined(figures: Sequence[BesideFigures]) -> BesideFigures | None:
    """Those of several turns: the medians, and the longest gap of all."""
    if not figures:
        return None
    quiet, during = (
        statistics.median(times) for times in zip(*((one.quiet_s, one.during_s) for one in figures), strict=True)
    )
    return BesideFigures(quiet, during, max(one.longest_s for one in figures))


@dataclass(slots=True)
class _Answer:
    """The times of one answer's tokens, on time.monotonic()."""

    times: list[float] = field(default_factory=list)


class RunningAnswers:
    """`count` answers that are written as long as the context lasts. An async context manager: on entry it waits until
    each of them has QUIET_TOKENS tokens. They are requests to the decode host alone."""

    def __init__(self, stream: OpenStream, model: str, count: int, *, vocab_size: int, context: int, timeout: float):
        self._stream, self._model, self._timeout = stream, model, timeout
        self._vocab_size, self._tokens = vocab_size, max(1, min(ANSWER_TOKENS, context - PROMPT_TOKENS))
        self._answers = [_Answer() for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        self._quiet: Window = (0.0, 0.0)

    async def __aenter__(self) -> RunningAnswers:
        self._tasks = [asyncio.ensure_future(self._write(answer)) for answer in self._answers]
        try:
            await self._wait_for(2)  # the first step of all of them together
            began = max(answer.times[-1] for answer in self._answers) if self._answers else 0.0
            await self._wait_for(QUIET_TOKENS)
        except BaseException:
            await self._end()
            raise
        self._quiet = (began, time.monotonic())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    @property
    def failure(self) -> DisaggError | None:
        """What ended one of the answers."""
        ended = (task.exception() for task in self._tasks if task.done() and not task.cancelled())
        return next((error for error in ended if isinstance(error, DisaggError)), None)

    async def figures(self, windows: Sequence[Window]) -> BesideFigures | None:
        """Once no measured request runs any more. windows: from each to its first token. None if no token came, there
        was no request, or an answer has failed."""
        after = time.monotonic()
        with suppress(DisaggError):
            await self._wait_for(QUIET_TOKENS)
        if self.failure is not None:
            return None
        times = [answer.times for answer in self._answers]
        quiet, during = (pace(times, some) for some in ([self._quiet, (after, time.monotonic())], merged(windows)))
        if quiet is None or during is None:
            return None
        return BesideFigures(quiet, during, max((longest(one, merged(windows)) for one in times), default=0.0))

    async def _write(self, answer: _Answer) -> None:
        dice = random.Random(id(answer))
        while True:
            tokens = tuple(dice.choices(range(self._vocab_size), k=PROMPT_TOKENS))
            request: dict[str, Any] = {"tokens": tokens, "max_tokens": self._tokens, "ignore_eos": True}
            async with self._stream(self._model, alone="decode", timeout=self._timeout, **request) as chunks:
                async for chunk in chunks:
                    answer.times += [chunk.arrived] * len(chunk.tokens)

    async def _wait_for(self, tokens: int) -> None:
        """Until each answer has so many more tokens. Raises what ended one of them."""
        wanted, deadline = [len(answer.times) + tokens for answer in self._answers], time.monotonic() + QUIET_S
        while any(len(answer.times) < count for answer, count in zip(self._answers, wanted, strict=True)):
            for task in self._tasks:
                if task.done():
                    task.result()
            if time.monotonic() > deadline:
                text = f"{len(self._answers)} answers did not run at once within {QUIET_S:g} s"
                raise ServerUnavailable(text, "lower --beside, or raise max_batch of the decode host")
            await asyncio.sleep(0.005)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def merged(windows: Sequence[Window]) -> list[Window]:
    """The same time without overlaps, in order."""
    found: list[Window] = []
    for began, ended in sorted(windows):
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        else:
            found.append((began, ended))
    return found


def pace(answers: Sequence[Sequence[float]], windows: Sequence[Window]) -> float | None:
    """Seconds per token of one answer within these windows, the mean of all answers; None if there was no token."""
    tokens = sum(bisect_left(times, end) - bisect_left(times, begin) for times in answers for begin, end in windows)
    seconds = sum(end - begin for begin, end in windows)
    return len(answers) * seconds / tokens if tokens and seconds > 0 else None


def longest(times: Sequence[float], windows: Sequence[Window]) -> float:
    """The longest time between two tokens that ends in one of these windows, or contains one."""
    gaps = (
        times[index] - times[index - 1]
        for begin, end in windows
        for index in range(max(1, bisect_left(times, begin)), min(len(times), bisect_left(times, end) + 1))
    )
    return max(gaps, default=0.0)
