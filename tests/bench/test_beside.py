"""What a prompt costs the answers that run beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from disagg.bench.beside import QUIET_TOKENS, BesideFigures, RunningAnswers, combined, longest, merged, pace
from disagg.errors import Overloaded, ServerUnavailable


def test_windows_that_overlap_are_one() -> None:
    assert merged([(5.0, 6.0), (1.0, 3.0), (2.0, 4.0)]) == [(1.0, 4.0), (5.0, 6.0)]
    assert merged([]) == []


def test_the_pace_is_the_mean_time_per_token_of_one_answer() -> None:
    steady, half = [float(at) for at in range(100)], [float(at) for at in range(0, 100, 2)]
    assert pace([steady], [(10.0, 20.0)]) == 1.0
    assert pace([steady, half], [(10.0, 20.0), (40.0, 50.0)]) == pytest.approx(2 * 20 / 30)
    assert pace([steady], [(200.0, 210.0)]) is None
    assert pace([steady], []) is None


def test_a_gap_counts_if_it_ends_in_a_window_or_contains_it() -> None:
    times = [0.0, 1.0, 2.0, 9.0, 10.0]
    assert longest(times, [(1.5, 2.5)]) == 7.0
    assert longest(times, [(0.5, 1.5)]) == 1.0
    assert longest(times, [(3.0, 4.0)]) == 7.0
    assert longest(times, [(20.0, 30.0)]) == 0.0
    assert longest([], [(1.0, 2.0)]) == 0.0


def test_several_turns_are_their_medians_and_the_longest_gap_of_all() -> None:
    turns = [BesideFigures(1.0, 2.0, 3.0), BesideFigures(1.0, 4.0, 9.0), BesideFigures(3.0, 3.0, 4.0)]
    assert combined(turns) == BesideFigures(1.0, 3.0, 9.0)
    assert combined([]) is None
    assert BesideFigures(0.010, 0.011, 0.05).slowdown == pytest.approx(1.1)
    assert BesideFigures(0.010, 0.011, 0.05).to_json()["quiet_tpot_ms"] == pytest.approx(10)


@dataclass
class Chunk:
    arrived: float
    tokens: tuple[int, ...] = (1,)


@dataclass
class Answers:
    """In place of a client's `stream`: a token every few milliseconds. fail_after: tokens."""

    every_s: float = 0.002
    fail_after: int | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, model: str, **request: Any) -> Self:
        self.asked.append(request)
        return self

    async def __aenter__(self) -> AsyncIterator[Chunk]:
        return self._tokens()

    async def __aexit__(self, *_: object) -> None:
        """Nothing to close."""

    async def _tokens(self) -> AsyncIterator[Chunk]:
        made = 0
        while self.fail_after is None or made < self.fail_after:
            await asyncio.sleep(self.every_s)
            made += 1
            yield Chunk(time.monotonic())
        raise Overloaded("no place")


def running(stream: Any, count: int = 3) -> RunningAnswers:
    return RunningAnswers(stream, "m", count, vocab_size=50, context=100, timeout=60.0)


async def test_they_run_on_the_decode_host_before_the_first_request_and_until_the_end() -> None:
    answers = Answers()
    async with running(answers) as beside:
        assert all(len(one.times) >= QUIET_TOKENS for one in beside._answers)
        now = time.monotonic()
        await asyncio.sleep(0.05)
        written = [len(one.times) for one in beside._answers]
        found = await beside.figures([(now, time.monotonic())])
        more = [len(one.times) - before for one, before in zip(beside._answers, written, strict=True)]
        assert min(more) >= QUIET_TOKENS, "the pace without a request is that after them, too"
    assert found is not None and found.quiet_s > 0.001 and found.longest_s >= 0.002
    assert len(answers.asked) == 3
    assert {(one["alone"], one["max_tokens"], len(one["tokens"])) for one in answers.asked} == {("decode", 84, 16)}
    assert all(task.done() for task in beside._tasks)


async def test_an_answer_that_fails_at_once_is_an_error() -> None:
    with pytest.raises(Overloaded):
        async with running(Answers(fail_after=3)):
            raise AssertionError("it does not begin")


async def test_an_answer_that_fails_later_leaves_no_figures() -> None:
    async with running(Answers(fail_after=QUIET_TOKENS + 20)) as beside:
        now = time.monotonic()
        while beside.failure is None:
            await asyncio.sleep(0.005)
        assert await beside.figures([(now, time.monotonic())]) is None
    assert isinstance(beside.failure, Overloaded)


async def test_answers_that_do_not_all_run_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.bench.beside.QUIET_S", 0.05)
    with pytest.raises(ServerUnavailable, match="3 answers did not run at once"):
        async with running(Answers(every_s=10.0)):
            raise AssertionError("they do not begin")


async def test_without_a_request_there_are_no_figures() -> None:
    async with running(Answers(), count=1) as beside:
        assert await beside.figures([]) is None
