"""disagg/fleet/lifecycle/loglines.py: what a server's log tells about its end, as a table."""

from __future__ import annotations

import pytest

from disagg.fleet.lifecycle.loglines import end_of_run, failure_of_start

STARTING = '{"level": "info", "event": "starting"}'
READY = '{"level": "info", "event": "ready"}'
STOPPED = '{"level": "info", "event": "stopped"}'
ERROR = '{"level": "error", "event": "start_failed", "message": "no such model"}'


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], ""),
        ([STARTING, READY], ""),
        ([STARTING, "UserWarning: a library's", READY], ""),
        ([STARTING, ERROR, STOPPED], "no such model"),
        ([STARTING, ERROR, STARTING, READY], ""),
        ([STARTING, READY, STOPPED], "it got a signal to stop, not from disagg"),
        ([STARTING, "Traceback (most recent call last):", "MemoryError: 2 GiB"], "MemoryError: 2 GiB"),
        (["ImportError: no module"], "ImportError: no module"),
        (
            [READY, "Fatal Python error: Aborted", "", "Thread 0x1:", '  File "a.py", line 1'],
            "Fatal Python error: Aborted",
        ),
    ],
)
def test_the_end_of_a_server_is_explained_by_its_last_run_alone(lines: list[str], reason: str) -> None:
    assert end_of_run(lines) == reason


@pytest.mark.parametrize(
    ("lines", "reason", "hint"),
    [
        ([], "", ""),
        ([STARTING, READY, STOPPED], "", ""),
        ([STARTING, "UserWarning: a library's", STOPPED], "", ""),
        ([STARTING, STOPPED, ERROR], "no such model", ""),
        ([STARTING, ERROR, STARTING, READY, STOPPED], "", ""),
        (["python: not found"], "python: not found", "disagg logs --host a"),
        (["ModuleNotFoundError: No module named 'disagg'"], "No module named 'disagg'", "pip install '.[server]'"),
    ],
)
def test_why_a_server_did_not_start_is_in_its_log(lines: list[str], reason: str, hint: str) -> None:
    failure = failure_of_start("a", lines)
    assert (failure is not None) is bool(reason)
    if failure is not None:
        assert reason in failure.message and hint in failure.hint
