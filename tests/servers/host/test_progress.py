"""disagg/servers/host/health.py: beats, and when an engine counts as stalled."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from disagg.servers.host.health import EngineProgress, StallPolicy, computed_s

POLICY = StallPolicy()
BETWEEN = (POLICY.quiet_s + POLICY.computing_s) / 2
SHORT, LONG = POLICY.quiet_s - 1, POLICY.computing_s + 1


def test_beats_count_up() -> None:
    progress = EngineProgress()
    progress.beat()
    progress.beat()
    assert progress.beats == 2


@pytest.mark.parametrize(
    ("steps", "stalled"),
    [
        ([(SHORT, True)], False),
        ([(LONG, True)], True),
        ([(LONG, False)], False),
        ([(LONG, False), (LONG + SHORT, True)], False),
        ([(LONG, False), (LONG + LONG, True)], True),
    ],
    ids=["working", "no beat", "no work", "work began after a while", "work began and stands still"],
)
def test_only_work_without_a_beat_is_a_stall(steps: list[tuple[float, bool]], stalled: bool) -> None:
    progress, now = EngineProgress(), time.monotonic()
    assert [progress.stalled_s(now + seconds, busy) > 0 for seconds, busy in steps][-1] is stalled


@pytest.mark.parametrize(
    ("worked_before_s", "computing", "stands_s", "stalled"),
    [
        (0.0, 0.0, SHORT, False),
        (0.0, 0.0, BETWEEN, True),
        (0.0, 0.01, BETWEEN, True),
        (0.0, 0.2, BETWEEN, False),
        (0.0, 1.0, LONG, True),
        (POLICY.idle_s - 1, 0.0, BETWEEN, True),
        (POLICY.idle_s + 1, 0.0, BETWEEN, False),
        (POLICY.idle_s + 1, 0.0, LONG, True),
    ],
    ids=[
        "a short piece",
        "stopped, or its GPU hangs",
        "only the rest of the server computes",
        "a slow CPU",
        "a CPU that is too slow",
        "stopped after a pause",
        "the first piece after a long pause",
        "stopped after a long pause",
    ],
)
def test_an_engine_that_does_not_even_compute_counts_as_stalled_earlier(
    worked_before_s: float, computing: float, stands_s: float, stalled: bool
) -> None:
    """worked_before_s: from the last beat until there is work again. computing: of one core, meanwhile."""
    clock = [0.0]
    progress = EngineProgress(POLICY, lambda: computing * clock[0])
    progress.beat()
    began = time.monotonic() + worked_before_s
    progress.excuse(began)
    for clock[0] in (0.5, 1.5, 2.5, stands_s):
        judged = progress.stalled_s(began + clock[0], busy=True)
    assert judged == (pytest.approx(stands_s) if stalled else 0)


def test_the_processor_time_is_not_read_while_the_engine_works() -> None:
    read = list[None]()
    progress = EngineProgress(POLICY, lambda: read.append(None) or 0.0)  # type: ignore[func-returns-value]  # None, then 0
    for _ in range(5):
        progress.beat()
        assert progress.stalled_s(time.monotonic() + POLICY.looked_s / 2, busy=True) == 0
    assert not read
    progress.stalled_s(time.monotonic() + 2 * POLICY.looked_s, busy=True)
    assert len(read) == 1


def test_the_policy_is_this_table() -> None:
    assert StallPolicy() == StallPolicy(looked_s=1.0, quiet_s=3.5, computing_s=10.0, idle_s=60.0, computing=0.05)


def test_the_processor_time_is_that_of_this_process_and_its_children_without_the_calling_thread() -> None:
    before = computed_s()
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        os.getpid()
    after = computed_s()
    child.communicate(b"\n", timeout=60)
    assert 0.25 < after - before < 0.55


def test_a_stall_lasts_until_the_next_beat_also_if_its_requests_have_ended() -> None:
    progress, now = EngineProgress(), time.monotonic()
    assert progress.stalled_s(now + LONG, busy=True) > 0
    assert progress.stalled_s(now + LONG + 1, busy=False) == pytest.approx(LONG + 1, abs=0.1)
    progress.beat()
    assert progress.stalled_s(time.monotonic() + SHORT, busy=True) == 0


def test_time_for_which_the_whole_process_was_stopped_does_not_count() -> None:
    progress, now = EngineProgress(), time.monotonic()
    progress.excuse(now + LONG)
    assert progress.stalled_s(now + LONG + SHORT, busy=True) == 0
