"""disagg/servers/health/progress.py: beats, and when an engine counts as stalled."""

from __future__ import annotations

import time

import pytest

from disagg.servers.health.progress import STALLED_S, Progress

SHORT, LONG = STALLED_S - 1, STALLED_S + 1


def test_beats_count_up() -> None:
    progress = Progress()
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
    progress, now = Progress(), time.monotonic()
    assert [progress.stalled(now + seconds, busy) for seconds, busy in steps][-1] is stalled


def test_a_beat_ends_a_stall() -> None:
    progress = Progress()
    assert progress.stalled(time.monotonic() + LONG, busy=True)
    progress.beat()
    assert not progress.stalled(time.monotonic() + SHORT, busy=True)


def test_time_for_which_the_whole_process_was_stopped_does_not_count() -> None:
    progress, now = Progress(), time.monotonic()
    progress.excuse(now + LONG)
    assert not progress.stalled(now + LONG + SHORT, busy=True)
