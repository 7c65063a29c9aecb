"""disagg/servers/prefill/order.py: who is next, as tables; scheduler.py: its thread, with runs that compute nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from disagg.api.layout import split_chunk
from disagg.api.requests import Share
from disagg.engines.base import PrefillTiming
from disagg.engines.process import COMPUTE_NICE
from disagg.errors import Cancelled, DisaggError, ModelError, Overloaded, PeerLost
from disagg.servers.prefill.order import ON_CPU, Candidate, Policy, chunk, is_alone, order
from disagg.servers.prefill.scheduler import PromptJob, Scheduler
from disagg.shares import Claim, Claims
from tests.deadlines import wait_until

PATIENCE_S = 60.0
POLICY = Policy(chunk_tokens=2048, kv_bytes=1000, queue_tokens=100_000)
NOW = 100.0
A, B = ("10.0.0.1", 9001), ("10.0.0.2", 9001)


def waiting(remaining: int, waited_s: float = 0.0, kv_bytes: int = 1, to: object = A) -> Candidate:
    return Candidate("waiting", NOW - waited_s, remaining, kv_bytes, to)


def started(remaining: int, waited_s: float = 0.0, *, behind: bool = False, stepped: int = 1) -> Candidate:
    return Candidate("started", NOW - waited_s, remaining, 1, A, behind, stepped)


def sending(kv_bytes: int = 1, to: object = A) -> Candidate:
    return Candidate("computed", NOW, 0, kv_bytes, to)


def head(one: Candidate, to: object = A) -> Candidate:
    return replace(one, head=True, to=to)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param([], [], id="nobody"),
        pytest.param([waiting(8000), waiting(100)], [1, 0], id="the shortest first"),
        pytest.param([started(7000), waiting(100)], [1, 0], id="a short one overtakes a long one that has begun"),
        pytest.param([started(50), waiting(100)], [0, 1], id="what counts is what remains"),
        pytest.param([waiting(100, 1), waiting(100, 2)], [1, 0], id="of equal ones the older first"),
        # 8000 tokens are 8 s at 1000 tokens/s: after 4 x 8 s it is before whatever arrives
        pytest.param([waiting(8000, 31), waiting(1)], [1, 0], id="a long one has not waited long enough"),
        pytest.param([waiting(8000, 33), waiting(1)], [0, 1], id="a long one has waited long enough"),
        pytest.param([started(10, behind=True), waiting(500)], [1], id="one whose receiver is behind is left out"),
        pytest.param([sending(), sending()], [], id="what is computed needs nothing"),
        pytest.param(
            [started(0, stepped=3), started(100, stepped=4)], [0, 1], id="after a piece of a prompt an answer"
        ),
        pytest.param([started(0, stepped=5), started(100, stepped=4)], [1, 0], id="after a token a piece of a prompt"),
        pytest.param([started(0, stepped=6), started(0, stepped=5)], [1, 0], id="answers take turns"),
    ],
)
def test_who_is_next(candidates: list[Candidate], expected: list[int]) -> None:
    assert order(candidates, NOW, 1000.0, POLICY) == expected


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param([sending(2000, B), waiting(5)], [], id="KV that does not fit waits"),
        pytest.param([waiting(5, kv_bytes=5000)], [0], id="a prompt that is alone may exceed the bound"),
        pytest.param([sending(900, B), waiting(5, kv_bytes=100)], [1], id="it fits exactly"),
        pytest.param(
            [sending(900, B), waiting(5, kv_bytes=101), waiting(9, kv_bytes=1)], [], id="nobody slips past it for ever"
        ),
        pytest.param([started(9), sending(990, B), waiting(5, kv_bytes=50)], [0], id="but what has begun goes on"),
        pytest.param([sending(400), waiting(5, kv_bytes=200), waiting(9, 0, 200, B)], [2], id="half for one receiver"),
        pytest.param(
            [*[sending()] * 8, waiting(5), waiting(9, to=B)], [9], id="at most eight prompts for one receiver"
        ),
        pytest.param([*[sending()] * 8, *[sending(to=B)] * 8, waiting(5, to=None)], [], id="at most sixteen in all"),
    ],
)
def test_who_may_start(candidates: list[Candidate], expected: list[int]) -> None:
    assert order(candidates, NOW, 1000.0, POLICY) == expected


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param([*[head(started(9, behind=True))] * 3, head(waiting(5))], [3], id="four for one decode host"),
        pytest.param(
            [*[head(started(9, behind=True))] * 4, head(waiting(5)), waiting(9), head(waiting(8), B)],
            [6, 5],
            id="others that wait for the same host pass",
        ),
        pytest.param([*[head(sending())] * 4, *[head(sending(), B)] * 4, head(waiting(5), "C")], [], id="eight in all"),
        pytest.param([*[head(sending())] * 4, *[head(sending(), B)] * 4, waiting(5, to="C")], [8], id="of heads"),
    ],
)
def test_heads_leave_half_of_the_places_to_others(candidates: list[Candidate], expected: list[int]) -> None:
    assert order(candidates, NOW, 1000.0, POLICY) == expected


BUSY: Claims = {"a": Claim(1, 8.0), "b": Claim(1, 0.1), "": Claim(1)}
"""Of the last 10 s, the key a has had 8, and the others hardly any."""


def of(key: str, one: Candidate) -> Candidate:
    return replace(one, key=key)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param([of("a", waiting(100, 60)), of("b", waiting(8000))], [1, 0], id="who has had most comes last"),
        pytest.param([of("a", started(100)), of("b", waiting(8000))], [1, 0], id="also with what has begun"),
        pytest.param([of("b", waiting(8000)), waiting(100)], [1, 0], id="among the others the shortest first"),
        pytest.param([of("a", waiting(8000)), of("a", waiting(100))], [1, 0], id="and among those of one key"),
        pytest.param([of("a", waiting(5)), *[of("a", sending(to=B))] * 13], [0], id="two places are kept free"),
        pytest.param([of("a", waiting(5)), *[of("a", sending(to=B))] * 14], [], id="for keys that have none"),
        pytest.param([of("b", waiting(5)), *[of("a", sending(to=B))] * 14], [0], id="which may take them"),
        pytest.param([of("a", waiting(5)), *[of("a", sending())] * 6], [], id="also of those for one receiver"),
        pytest.param([of("b", waiting(5)), *[of("a", sending())] * 6], [0], id="for keys without any"),
        pytest.param([of("a", head(waiting(5))), *[of("a", head(sending()))] * 3], [], id="and one of those for heads"),
        pytest.param([of("b", head(waiting(5))), *[of("a", head(sending()))] * 3], [0], id="for a key without one"),
    ],
)
def test_keys_have_fair_shares_of_the_computing(candidates: list[Candidate], expected: list[int]) -> None:
    assert order(candidates, NOW, 1000.0, POLICY, BUSY) == expected


def test_of_an_engine_that_computes_all_that_have_begun_the_others_begin_first() -> None:
    together = [of("a", waiting(10, 60)), of("b", waiting(10)), waiting(10, 30), of("a", started(10))]
    assert order(together, NOW, 1000.0, replace(POLICY, together=True), BUSY) == [2, 1, 0, 3]


@pytest.mark.parametrize(
    ("alone", "tokens_s", "expected"),
    [(True, 10_000, 2048), (True, 2000, 1000), (True, 100, 512), (True, 0.0, 512), (False, 10_000, 512)],
)
def test_chunks_are_short_enough_that_others_need_not_wait_long(alone: bool, tokens_s: float, expected: int) -> None:
    assert chunk(alone, tokens_s, POLICY) == expected
    assert chunk(alone, tokens_s, replace(POLICY, chunk_tokens=64)) == 64
    assert chunk(alone, 100, replace(POLICY, least_chunk_tokens=32)) == 50


@pytest.mark.parametrize(("alone", "tokens_s", "expected"), [(True, 2000, 300), (False, 5000, 150), (False, 100, 64)])
def test_a_cpu_computes_shorter_chunks_while_others_come(alone: bool, tokens_s: float, expected: int) -> None:
    assert chunk(alone, tokens_s, replace(POLICY, **ON_CPU)) == expected


@pytest.mark.parametrize(
    ("arrived", "others", "latest", "alone"),
    [
        (10.0, [], 10.0, True),
        (10.0, [5.0], 10.0, False),
        (10.0, [], 19.5, False),
        (10.0, [], 18.5, True),
        (19.6, [], 19.5, True),
    ],
    ids=["the only one", "another waits", "another came lately", "another came long ago", "none came since"],
)
def test_a_prompt_has_the_thread_to_itself_if_no_other_waits_or_came_lately(
    arrived: float, others: list[float], latest: float, alone: bool
) -> None:
    assert is_alone(arrived, others, latest, now=20.0, policy=POLICY) is alone


class Run:
    """A run of `tokens` tokens whose steps note their name. before: called by each step."""

    held = 0
    timing = PrefillTiming(0.0, 0)

    def __init__(self, name: str, tokens: int, log: list[str], before: Callable[[], None] = lambda: None) -> None:
        self.name, self.remaining = name, tokens
        self.log, self.before = log, before
        self.closed = threading.Event()

    @property
    def done(self) -> bool:
        return self.remaining == 0

    def step(self, max_tokens: int | None = None) -> None:
        self.before()
        self.log.append(self.name)
        self.remaining -= min(self.remaining, max_tokens or self.remaining)

    def close(self) -> None:
        self.closed.set()


def job(run: Run, queued_bytes: Callable[[], int] = lambda: 0, key: str = "", **options: Any) -> PromptJob:
    return PromptJob(run.name, run.remaining, 10, lambda: run, A, queued_bytes, Share(key), **options)


@contextmanager
def scheduling(policy: Policy = POLICY) -> Iterator[Scheduler]:
    scheduler = Scheduler(policy)
    try:
        yield scheduler
    finally:
        scheduler.close()


def waited(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def test_a_short_prompt_is_computed_between_two_chunks_of_a_long_one() -> None:
    log: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    long, short = job(Run("long", 2000, log, pause)), job(Run("short", 100, log))
    with scheduling() as scheduler:
        scheduler.policy = replace(POLICY, lately_s=PATIENCE_S)
        scheduler.submit(long)
        assert begun.wait(PATIENCE_S)
        scheduler.submit(short)
        assert (scheduler.tokens, scheduler.kv_bytes, scheduler.busy) == (2100, 10, True)
        go_on.set()
        for one in (long, short):
            one.computed.result(PATIENCE_S)
        assert log == ["long", "short", "long", "long", "long"], "after the short one, others may come"
        assert (scheduler.tokens, scheduler.kv_bytes, scheduler.busy) == (0, 20, False)
        scheduler.release(long)
        scheduler.release(short)
        assert scheduler.kv_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a nice value is the whole process's")
@pytest.mark.parametrize("yields", [True, False])
def test_on_a_cpu_the_other_threads_have_a_core_before_the_one_that_computes(yields: bool) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    found: list[int] = []
    run = Run("prompt", 100, [], lambda: found.append(os.getpriority(os.PRIO_PROCESS, 0)))
    with scheduling(replace(POLICY, yields=yields)) as scheduler:
        scheduler.submit(one := job(run))
        one.computed.result(PATIENCE_S)
    assert found == [max(here, COMPUTE_NICE) if yields else here]
    assert replace(POLICY, **ON_CPU).yields and os.getpriority(os.PRIO_PROCESS, 0) == here


class TogetherRun(Run):
    """One of several that share each step, which finds `prefix` tokens of this one held."""

    everyone: list[TogetherRun]
    prefix = 0

    def step(self, max_tokens: int | None = None) -> None:
        for run in self.everyone:
            run.held = run.prefix
            run.remaining = 0


def test_the_speed_of_a_step_of_several_prompts_is_of_all_tokens_that_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rated: list[int] = []
    runs = [TogetherRun(name, 256, []) for name in "abcd"]
    runs[3].prefix = 200
    with scheduling(replace(POLICY, together=True)) as scheduler:
        monkeypatch.setattr(scheduler, "_rate", lambda job, tokens, seconds: rated.append(tokens))
        jobs = [job(run) for run in runs]
        for run in runs:
            run.everyone = runs
        with scheduler._changed:  # so that all are there before the first step
            for one in jobs:
                scheduler.submit(one)
        for one in jobs:
            one.computed.result(PATIENCE_S)
    assert rated == [3 * 256 + 56]


@pytest.mark.parametrize("bug", [RuntimeError("bug"), ValueError("temperature"), MemoryError(), PeerLost("gone")])
@pytest.mark.parametrize("opening", [True, False])
def test_a_failure_ends_its_own_prompt_and_no_other(bug: Exception, opening: bool) -> None:
    def fail() -> None:
        raise bug

    def open_run() -> Run:
        if opening:
            fail()
        return run

    run = Run("bad", 100, [], fail)
    bad, good = PromptJob("bad", 100, 10, open_run), job(Run("good", 600, []))
    with scheduling() as scheduler:
        scheduler.submit(good)
        scheduler.submit(bad)
        with pytest.raises(type(bug) if isinstance(bug, DisaggError) else ModelError, match=str(bug) or "MemoryError"):
            bad.computed.result(PATIENCE_S)
        assert bad.started.exception(0) if opening else run.closed.wait(PATIENCE_S)
        good.computed.result(PATIENCE_S)
        assert scheduler.alive and scheduler.kv_bytes == 10


def test_a_prompt_whose_receiver_is_behind_waits_and_others_do_not() -> None:
    queued = POLICY.behind_bytes + 1
    log: list[str] = []
    slow = job(Run("slow", 1500, log), lambda: queued if log else 0)
    with scheduling() as scheduler:
        scheduler.submit(slow)
        wait_until(lambda: log == ["slow"] and not scheduler.busy)
        other = job(Run("other", 1500, log))
        scheduler.submit(other)
        other.computed.result(PATIENCE_S)
        assert log == ["slow", *["other"] * 3] and not slow.computed.done()
        queued = 0
        slow.computed.result(PATIENCE_S)
        assert [wait.nbytes for wait in slow.waits] == [1] and not other.waits


def test_a_prompt_whose_decode_host_has_not_computed_its_layers_waits_and_says_how_long() -> None:
    starved = True
    log: list[str] = []
    slow = job(Run("slow", 1500, log), starved=lambda: starved and bool(log), layers=0.5)
    with scheduling() as scheduler:
        scheduler.submit(slow)
        wait_until(lambda: log == ["slow"] and not scheduler.busy and time.monotonic() > (slow.starved_since or 1e99))
        assert scheduler.tokens == round(slow.work) > 0 and scheduler.tokens_ahead == 0 and scheduler.queue_s == 0
        other = job(Run("other", 1500, log))
        scheduler.submit(other)
        other.computed.result(PATIENCE_S)
        assert log == ["slow", *["other"] * 3] and not slow.computed.done()
        starved = False
        slow.computed.result(PATIENCE_S)
        assert slow.starved_s > 0 and slow.starved_since is None and not slow.waits
        assert other.starved_s == 0


def test_a_prompt_that_waits_for_the_link_is_not_starved_besides() -> None:
    log: list[str] = []
    slow = job(Run("slow", 1500, log), lambda: POLICY.behind_bytes + 1 if log else 0, starved=lambda: bool(log))
    with scheduling() as scheduler:
        scheduler.submit(slow)
        wait_until(lambda: log == ["slow"] and not scheduler.busy)
        assert slow.starved_since is None and len(slow.waits) == 1


def test_some_layers_of_a_prompt_count_as_a_part_of_it() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    first = job(Run("first", 100, [], pause))
    quarter = job(Run("quarter", 1000, []), layers=0.25)
    with scheduling(replace(POLICY, queue_tokens=400)) as scheduler:
        scheduler.submit(first)
        waited(begun)
        scheduler.submit(quarter)
        assert scheduler.tokens == 100 + 250
        with pytest.raises(Overloaded):
            scheduler.submit(job(Run("whole", 1000, [])))
        go_on.set()
        quarter.computed.result(PATIENCE_S)


def test_the_speed_of_a_prompt_that_is_scored_is_not_that_of_prompts() -> None:
    scored = job(Run("scored", 100, []), scored=True)
    with scheduling() as scheduler:
        scheduler._rate(scored, 1000, 2.0)
        assert (scored.tokens_s, scheduler.tokens_s) == (500.0, None)


def test_the_speed_of_a_head_is_that_of_all_layers() -> None:
    head = job(Run("head", 100, []), layers=0.25)
    with scheduling() as scheduler:
        scheduler._rate(head, 1000, 2.0)
        assert head.tokens_s == scheduler.tokens_s == 125.0


@pytest.mark.parametrize(("tokens", "most"), [(300, 512), (8192, 512), (8193, 1024), (100_000, 1024)])
def test_chunks_of_a_split_are_short_because_each_end_waits_for_one(tokens: int, most: int) -> None:
    assert split_chunk(tokens) == most
    steps: list[int] = []

    class Noted(Run):
        def step(self, max_tokens: int | None = None) -> None:
            steps.append(min(max_tokens or 0, self.remaining))
            super().step(max_tokens)

    head = job(Noted("head", tokens, []), layers=0.5)
    with scheduling(replace(POLICY, least_chunk_tokens=2048)) as scheduler:
        scheduler.submit(head)
        head.computed.result(PATIENCE_S)
    assert max(steps) == min(tokens, most) and sum(steps) == tokens


def test_the_thread_beats_while_it_waits_for_receivers() -> None:
    beats: list[None] = []
    log: list[str] = []
    scheduler = Scheduler(POLICY, lambda: beats.append(None))
    scheduler.submit(job(Run("slow", 1500, log), lambda: POLICY.behind_bytes + 1 if log else 0))
    wait_until(lambda: len(beats) > 5)
    assert log == ["slow"]
    scheduler.close()


def test_a_released_prompt_is_computed_no_further() -> None:
    log: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    run = Run("left", 5000, log, pause)
    left = job(run)
    with scheduling() as scheduler:
        scheduler.submit(left)
        assert begun.wait(PATIENCE_S)
        scheduler.release(left)
        assert scheduler.kv_bytes == 10, "until its step has ended"
        go_on.set()
        assert run.closed.wait(PATIENCE_S) and log == ["left"]
        with pytest.raises(Cancelled):
            left.computed.result(PATIENCE_S)
        wait_until(lambda: scheduler.kv_bytes == 0)


def test_more_tokens_than_may_wait_are_refused() -> None:
    go_on = threading.Event()
    with scheduling(replace(POLICY, queue_tokens=1000)) as scheduler:
        scheduler.submit(job(Run("first", 5000, [], lambda: waited(go_on))))
        with pytest.raises(Overloaded, match="5000 prompt tokens wait to be computed, and 1 more are too many"):
            scheduler.submit(job(Run("second", 1, [])))
        assert scheduler.queue_s == 5
        go_on.set()


def test_the_tokens_of_another_key_do_not_keep_a_prompt_out_that_is_within_its_share() -> None:
    go_on = threading.Event()
    with scheduling(replace(POLICY, queue_tokens=1000)) as scheduler:
        scheduler.submit(job(Run("first", 900, [], lambda: waited(go_on)), key="a"))
        with pytest.raises(Overloaded):
            scheduler.submit(job(Run("second", 200, []), key="a"))
        scheduler.submit(job(Run("third", 500, []), key="b"))
        with pytest.raises(Overloaded, match="1400 prompt tokens wait"):
            scheduler.submit(job(Run("fourth", 1, []), key="b"))
        go_on.set()


def test_a_key_that_has_had_most_of_the_computing_waits_for_the_others() -> None:
    log: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)

    many = [job(Run("many", 512, log, pause), key="a") for _ in range(3)]
    one = job(Run("one", 4000, log), key="b")
    with scheduling() as scheduler:
        for prompt in many:
            scheduler.submit(prompt)
        assert begun.wait(PATIENCE_S)
        with scheduler._changed:
            scheduler._computing.computed("a", 8.0, time.monotonic())
        scheduler.submit(one)
        go_on.set()
        for prompt in (*many, one):
            prompt.computed.result(PATIENCE_S)
    assert log == ["many", *["one"] * 8, "many", "many"]


def test_closing_ends_every_prompt_and_takes_no_more() -> None:
    go_on = threading.Event()
    jobs = [job(Run(str(number), 1500, [], lambda: waited(go_on))) for number in range(3)]
    scheduler = Scheduler(POLICY)
    for one in jobs:
        scheduler.submit(one)
    wait_until(lambda: any(one.started.done() for one in jobs))
    threading.Timer(0.05, go_on.set).start()
    scheduler.close()
    assert not scheduler.alive
    for one in jobs:
        with pytest.raises(Cancelled):
            one.computed.result(PATIENCE_S)
    with pytest.raises(ModelError, match="thread has ended"):
        scheduler.submit(job(Run("late", 1, [])))


def test_a_thread_that_dies_leaves_nobody_waiting() -> None:
    def die() -> None:
        raise SystemExit

    dead, other = job(Run("dead", 100, [], die)), job(Run("other", 1500, []))
    scheduler = Scheduler(POLICY)
    scheduler.submit(other)
    scheduler.submit(dead)
    for one in (dead, other):
        with pytest.raises(ModelError, match="thread has ended"):
            one.computed.result(PATIENCE_S)
    wait_until(lambda: not scheduler.alive)
