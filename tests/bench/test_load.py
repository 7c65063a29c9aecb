"""The load generator against real servers, and against streams that misbehave on purpose."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg.api.events import TokenLogprob
from disagg.bench.load import RunMonitor, estimate, run
from disagg.bench.plan import arrival_times
from disagg.bench.workloads import RandomTokens
from disagg.errors import Overloaded
from disagg.inference.client import AsyncClient
from disagg.inference.stream import AsyncStream
from disagg.inference.types import Chunk, Completion
from tests import tiny_models
from tests.bench.bench_parts import WITHOUT_SPLIT, plan, point
from tests.cli.answers import completion
from tests.deadlines import wait_until
from tests.fleets import TOKEN, RunningFleet, running, write_hosts

WORKLOAD = RandomTokens(tiny_models.VOCAB)


async def play(fleet: RunningFleet, made: Any, monitor: RunMonitor | None = None, timeout: float = 60.0) -> Any:
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:
        return await run(client.stream, "tiny", made, WORKLOAD, monitor or RunMonitor(), timeout=timeout)


def totals(fleet: RunningFleet) -> Counter[str]:
    return Counter(fleet.status("tiny-decode")["counters"]) + Counter(fleet.status("tiny-prefill")["counters"])


async def test_exactly_the_asked_for_tokens_reach_the_servers_and_come_back(tiny_fleet: RunningFleet) -> None:
    before = totals(tiny_fleet)
    turn_results = await play(tiny_fleet, plan((point(77, 9),), requests=3, warmup=0))
    after = totals(tiny_fleet)
    records = [record for turn in turn_results for record in turn.records]
    assert [turn.mode for turn in turn_results] == list(WITHOUT_SPLIT) * 3
    assert [(r.metrics.prompt_tokens, r.metrics.completion_tokens) for r in records] == [(77, 9)] * 9
    assert all(len(record.itl) == 8 for record in records)
    # A hand-off shows its prompt to both hosts: 3 x (2 + 1 + 1).
    assert after["prompt_tokens"] - before["prompt_tokens"] == 12 * 77
    assert after["completion_tokens"] - before["completion_tokens"] == 9 * 9


async def test_each_mode_runs_where_it_says(tiny_fleet: RunningFleet) -> None:
    turn_results = await play(tiny_fleet, plan((point(40, 3),), requests=1, warmup=0))
    methods = {turn.mode: turn.records[0].metrics.method for turn in turn_results}
    assert methods == {
        "disaggregated": "disaggregated",
        "decode-alone": "decode-alone",
        "prefill-alone": "prefill-alone",
    }
    assert turn_results[0].records[0].metrics.decode_computed_tokens == 1


async def test_gaps_and_parts_agree_with_the_whole(tiny_fleet: RunningFleet) -> None:
    turn_results = await play(tiny_fleet, plan((point(60, 8),), requests=4, warmup=1))
    for record in (record for turn in turn_results if not turn.warmup for record in turn.records):
        metrics = record.metrics
        assert sum(record.itl) == pytest.approx(metrics.total_time - metrics.ttft, rel=0.1, abs=0.02)
        assert metrics.ttft_parts.total == pytest.approx(metrics.ttft)


async def test_concurrency_keeps_that_many_under_way(tiny_fleet: RunningFleet) -> None:
    made = plan((point(60, 6, concurrency=3),), modes=("decode-alone",), requests=9, rounds=1, warmup=0)
    (turn,) = await play(tiny_fleet, made)
    events = sorted(event for r in turn.records for event in ((r.sent, 1), (r.sent + r.metrics.total_time, -1)))
    under_way, most = 0, 0
    for _, change in events:
        under_way += change
        most = max(most, under_way)
    assert most == 3 and len(turn.records) == 9


async def test_requests_are_sent_when_the_seed_says(tiny_fleet: RunningFleet) -> None:
    made = plan(
        (point(20, 2, concurrency=None, rate=20.0),), modes=("disaggregated",), requests=8, rounds=1, warmup=0, seed=5
    )
    (turn,) = await play(tiny_fleet, made)
    times = arrival_times(made, made.points[0].load)
    begin = turn.records[0].due - times[0]
    assert [record.due - begin for record in turn.records] == pytest.approx(times)
    assert all(record.sent >= record.due - 0.001 for record in turn.records)
    assert len(turn.records) == 8


async def test_stopping_keeps_what_had_ended_and_leaves_nothing_on_the_servers(tiny_fleet: RunningFleet) -> None:
    monitor = RunMonitor()
    monitor.changed = lambda: monitor.end("enough") if monitor.done == 2 else None
    made = plan((point(1500, 100),), modes=("disaggregated",), requests=50, warmup=0)
    turn_results = await play(tiny_fleet, made, monitor)
    assert sum(len(turn.records) for turn in turn_results) == 2 and monitor.reason == "enough"

    def idle() -> bool:
        states = [tiny_fleet.status(host) for host in ("tiny-decode", "tiny-prefill")]
        return all((state["running"], state["queue"], state["kv_bytes"]) == (0, 0, 0) for state in states)

    wait_until(idle, 20, "the servers to be idle")


async def test_requests_cut_off_by_a_stop_are_unfinished_not_failed(tiny_fleet: RunningFleet) -> None:
    monitor = RunMonitor()
    made = plan((point(1000, 1000, concurrency=2),), modes=("decode-alone",), requests=4, rounds=1, warmup=0)
    asyncio.get_running_loop().call_later(0.3, monitor.end, "time is up")
    (turn,) = await play(tiny_fleet, made, monitor)
    assert turn.unfinished == 2 and turn.records == () and not monitor.failures


async def test_a_request_over_its_deadline_is_a_counted_failure(tiny_fleet: RunningFleet) -> None:
    made = plan((point(500, 1000),), modes=("decode-alone",), requests=2, warmup=0)
    monitor = RunMonitor()
    turn_results = await play(tiny_fleet, made, monitor, timeout=0.2)
    assert [record.error for turn in turn_results for record in turn.records] == ["DeadlineExceeded"] * 2
    assert monitor.failures == {"DeadlineExceeded": 2} and monitor.done == 2


@pytest.mark.timeout(180)
async def test_when_the_prefill_host_dies_midway_every_request_is_still_accounted_for(tmp_path: Path) -> None:
    model = tiny_models.make("qwen3", tmp_path / "model")
    with running(write_hosts(tmp_path, {"tiny": model}, context=2048)) as fleet:
        monitor = RunMonitor()

        def kill_after_six() -> None:
            if monitor.done == 6:
                fleet.processes["tiny-prefill"].kill()
                fleet.processes["tiny-prefill"].wait()

        monitor.changed = kill_after_six
        three_at_once = point(50, 4, concurrency=None, rate=20.0)  # each waits 8 s for the host that is down
        made = plan((three_at_once,), modes=("disaggregated", "prefill-alone"), requests=6, rounds=2, warmup=0)
        turn_results = await play(fleet, made, monitor, timeout=8.0)
        fleet.processes.pop("tiny-prefill")
    by_mode = {mode: [r for turn in turn_results if turn.mode == mode for r in turn.records] for mode in made.modes}
    assert all(len(records) == 6 for records in by_mode.values())
    assert [record.fell_back for record in by_mode["disaggregated"]] == [False] * 3 + [True] * 3
    errors = [record.error for record in by_mode["prefill-alone"]]
    assert errors[:3] == [""] * 3 and set(errors[3:]) <= {"ServerUnavailable", "ServerNotRunning"}, errors
    assert sum(monitor.failures.values()) == 3


class Answering:
    """A stream of `tokens` after `delay`, or an error; keeps how many were open at once."""

    def __init__(self, prompt: int = 5, output: int = 2, error: Exception | None = None) -> None:
        self.prompt, self.output, self.error = prompt, output, error
        self.closed = 0

    def stream(self, model: Any, **request: Any) -> AsyncStream:
        return AsyncStream(self.answer)

    async def answer(self, deliver: Callable[[Chunk], None]) -> Completion:
        try:
            await asyncio.sleep(0)
            if self.error:
                raise self.error
            deliver(Chunk("ab", (TokenLogprob(1, 0.0), TokenLogprob(2, 0.0)), 1.0))
            return completion("tiny", prompt_tokens=self.prompt, completion_tokens=self.output)
        finally:
            self.closed += 1


async def fake(answering: Answering, monitor: RunMonitor | None = None, **changed: Any) -> Any:
    made = plan((point(5, 2),), **{"modes": ("disaggregated",), "requests": 2, "warmup": 0, **changed})
    return await run(answering.stream, "tiny", made, WORKLOAD, monitor or RunMonitor(), timeout=5)


async def test_tokens_that_arrive_together_are_no_time_apart() -> None:
    turn_results = await fake(Answering())
    assert turn_results[0].records[0].itl == (0.0,)


async def test_an_answer_of_the_wrong_length_is_a_failure_since_no_figure_of_it_would_hold() -> None:
    turn_results = await fake(Answering(prompt=5, output=1))
    record = turn_results[0].records[0]
    assert record.error == "WrongTokenCount" and record.metrics is None
    assert record.message == "5 prompt and 1 output tokens instead of 5 and 2"


async def test_refused_requests_are_neither_dropped_nor_sent_again() -> None:
    answering, monitor = Answering(error=Overloaded("full")), RunMonitor()
    turn_results = await fake(answering, monitor)
    assert [record.error for turn in turn_results for record in turn.records] == ["Overloaded"] * 2
    assert answering.closed == 2 and monitor.failures == {"Overloaded": 2}


async def test_a_bug_is_not_taken_for_a_failed_request() -> None:
    with pytest.raises(ZeroDivisionError):
        await fake(Answering(error=ZeroDivisionError()))


async def test_a_bug_ends_the_run_at_once_and_closes_the_requests_beside_it() -> None:
    opened: list[int] = []
    closed: list[int] = []

    async def answer(deliver: Callable[[Chunk], None]) -> Completion:
        number = len(opened)
        opened.append(number)
        try:
            if number != 1:
                await asyncio.sleep(3600)
            raise ZeroDivisionError
        finally:
            closed.append(number)

    def stream(model: Any, **request: Any) -> AsyncStream:
        return AsyncStream(answer)

    made = plan((point(5, 2, concurrency=2),), modes=("disaggregated",), requests=4, rounds=1, warmup=0)
    async with asyncio.timeout(10):
        with pytest.raises(ZeroDivisionError):
            await run(stream, "tiny", made, WORKLOAD, RunMonitor(), timeout=5)
    assert len(closed) >= 2


async def test_progress_reaches_its_whole() -> None:
    monitor = RunMonitor()
    await fake(Answering(), monitor, requests=3, warmup=2)
    assert monitor.done == 5 and monitor.work == monitor.total_work == 5 * 7


async def test_a_stopped_run_begins_no_further_turn() -> None:
    monitor = RunMonitor()
    monitor.end("before it began")
    monitor.end("later")
    assert await fake(Answering(), monitor) == [] and monitor.reason == "before it began"


async def test_an_estimate_needs_every_mode_to_answer(tiny_fleet: RunningFleet) -> None:
    made = plan((point(40, 3), point(80, 3)), requests=2)
    async with AsyncClient(tiny_fleet.fleet, token=TOKEN) as client:
        seconds = await estimate(client.stream, "tiny", made, WORKLOAD, RunMonitor(), timeout=60.0)
        assert seconds is not None and 0 < seconds < 60
        assert await estimate(client.stream, "tiny", made, WORKLOAD, RunMonitor(), timeout=1e-4) is None


async def test_a_run_that_is_stopped_needs_no_estimate(tiny_fleet: RunningFleet) -> None:
    monitor = RunMonitor()
    monitor.end("interrupted")
    async with AsyncClient(tiny_fleet.fleet, token=TOKEN) as client:
        made = plan((point(1000, 900),))
        assert await estimate(client.stream, "tiny", made, WORKLOAD, monitor, timeout=60.0) is None
