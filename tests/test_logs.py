"""disagg/logs.py: how many lines there are, and which file they are in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from disagg.api.names import LOG_FILE_VARIABLE
from disagg.logs import MAX_LINES, WINDOW_S, LogFile, RateLimit

ROOT = Path(__file__).parents[2]


def test_a_kind_of_line_is_limited_for_a_while_and_what_was_left_out_is_counted() -> None:
    limit = RateLimit()
    assert [limit.allow("refused", 0.0) for _ in range(MAX_LINES + 3)] == [True] * MAX_LINES + [False] * 3
    assert limit.allow("other", 1.0)
    assert limit.ended(WINDOW_S - 1) == [] and limit.ended(WINDOW_S) == [("refused", 3)]
    assert limit.allow("refused", WINDOW_S) and limit.ended(3 * WINDOW_S) == []


def run(code: str, log: Path, expect: int = 0, log_file: Path | None = None) -> list[dict[str, Any]]:
    """The log's lines of a process that configures its logs and runs `code`."""
    program = f"import logging; from disagg import logs; logs.configure()\n{code}"
    with log.open("ab") as output:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(ROOT), **({LOG_FILE_VARIABLE: str(log_file)} if log_file else {})},
            check=False,
            timeout=60,
        )
    assert done.returncode == expect, log.read_text()
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def test_lines_without_a_request_are_limited_and_those_of_requests_are_not(tmp_path: Path) -> None:
    lines = run(
        "for n in range(1000): logging.getLogger('disagg.kv').warning('refused %d', n)\n"
        "for n in range(50): logs.info('request_failed', request_id=str(n))\n"
        "logs.time.monotonic = lambda: 1e9\n"
        "logs.summarise()\n",
        tmp_path / "log",
    )
    assert len([line for line in lines if line["event"].startswith("refused")]) == MAX_LINES
    assert len([line for line in lines if line["event"] == "request_failed"]) == 50
    last = lines[-1]
    assert (last["event"], last["kind"], last["lines"]) == ("lines_left_out", "disagg.kv: refused %d", 980)


def test_a_process_that_never_summarises_writes_again_once_the_time_is_over(tmp_path: Path) -> None:
    lines = run(
        "for n in range(30): logging.getLogger('disagg.gateway').warning('refused %d', n)\n"
        "logs.time.monotonic = lambda: 1e9\n"
        "logging.getLogger('disagg.gateway').warning('refused %d', 30)\n",
        tmp_path / "log",
    )
    assert [line["event"] for line in lines[-2:]] == ["lines_left_out", "refused 30"] and lines[-2]["lines"] == 10


def test_a_full_log_is_rotated_while_the_process_runs_and_native_output_follows(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run(
        "import os\n"
        "logging.getLogger().handlers[0]._file._limit = 1000\n"
        "for n in range(25): logs.info('line', request_id='r', number=n, filling='x' * 100)\n"
        "os.write(1, b'from native code\\n')\n",
        log,
        log_file=log,
    )
    old, new = (tmp_path / "log.1").read_text(), log.read_text()
    assert 1000 < len(old) < 1400 and len(new) < 1400
    assert '"number": 24' in old + new and "from native code" in new


def test_output_that_goes_elsewhere_is_not_rotated(tmp_path: Path) -> None:
    log, other = tmp_path / "log", tmp_path / "other"
    other.write_text("untouched")
    code = "logging.getLogger().handlers[0]._file._limit = 10\nfor _ in range(5): logs.info('line', request_id='r')"
    assert len(run(code, log, log_file=other)) == 5
    assert other.read_text() == "untouched" and not (tmp_path / "other.1").exists()


def test_a_disk_that_takes_no_new_file_does_not_end_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b"x" * 100)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    file = LogFile(path, 10, (descriptor,))
    file.rotate_if_full()
    os.write(descriptor, b"y")
    os.close(descriptor)
    assert path.read_bytes() == b"x" * 100 + b"y"


def test_a_crash_in_native_code_leaves_its_traces(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run("import os; os.abort()", log, expect=-6)
    assert "Fatal Python error: Aborted" in log.read_text()


def test_an_exception_that_ends_a_thread_is_one_line_with_its_traceback(tmp_path: Path) -> None:
    code = "import threading\nthread = threading.Thread(target=lambda: 1 / 0, name='t')\nthread.start()\nthread.join()"
    (line,) = run(code, tmp_path / "log")
    assert (line["event"], line["thread"]) == ("thread_failed", "t") and "ZeroDivisionError" in line["traceback"]
