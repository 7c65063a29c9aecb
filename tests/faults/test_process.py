"""The faults of processes do what the matrix states."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import disagg
from tests.deadlines import wait_until
from tests.faults.fleet import leaked_threads
from tests.faults.ptrace import StoppedThread, busiest_thread
from tests.threads import threads_by_name

ECHO = """
import sys, threading, time
def put(line):  # in one call: print writes the end of a line by itself, and the other thread's line may come before it
    sys.stdout.write(line)
    sys.stdout.flush()
threading.Thread(target=lambda: [put(line) for line in sys.stdin], daemon=True).start()
while True: put("first\\n"); time.sleep(0.01)
"""
PACKAGE = Path(disagg.__file__).parent
ROOT = Path(__file__).parents[2]


@pytest.fixture
def echo() -> Iterator[subprocess.Popen[str]]:
    """A process whose first thread writes "first" all the time, and whose second one echoes lines."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ECHO], stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout
    return [process.stdout.readline().strip() for _ in range(count)]


def test_a_stopped_thread_does_nothing_while_the_others_of_its_process_go_on(echo: subprocess.Popen[str]) -> None:
    write(echo, "ready")
    while "ready" not in lines(echo, 1):
        pass
    # It waits for its next line, and so holds no lock of the interpreter, which would stop the first thread too.
    stopped = StoppedThread(blocked(busiest_thread(echo.pid), echo.pid))
    write(echo, "again")
    try:
        assert set(lines(echo, 50)) == {"first"}
    finally:
        stopped.release()
    while "again" not in lines(echo, 1):
        pass


def blocked(thread_id: int, pid: int) -> int:
    """The thread, once it waits in a read."""
    where = Path(f"/proc/{pid}/task/{thread_id}/syscall")
    wait_until(lambda: where.read_text().startswith("0 "), 60, "the thread to read")
    return thread_id


def test_a_thread_that_does_not_exist_cannot_be_stopped() -> None:
    with pytest.raises(ProcessLookupError):
        StoppedThread(2**22 - 1)


def test_nothing_that_waits_reads_the_wall_clock_which_may_jump() -> None:
    readers = [
        str(path.relative_to(PACKAGE))
        for room in ("servers", "kv", "inference", "engines", "http")
        for path in (PACKAGE / room).rglob("*.py")
        if re.search(r"\btime\.time\(|\btime_ns\(|datetime", path.read_text())
    ]
    assert sorted(readers) == ["servers/host/record.py", "servers/host/report.py"], "strikes, the last error: stated"


NAMED = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from tests.threads import name_threads_in_the_system
name_threads_in_the_system()
pool = ThreadPoolExecutor(2, thread_name_prefix="kv-memory")
both = threading.Barrier(2)
for work in [pool.submit(both.wait) for _ in range(2)]: work.result()
threading.Thread(target=threading.Event().wait, name="a-name-of-over-15", daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


def test_threads_are_counted_by_the_names_that_python_gives_them() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert lines(process, 1) == ["ready"]
        expected = {"kv-memory": 2, "a-name-of-over-": 1}
        wait_until(lambda: expected.items() <= threads_by_name(process.pid).items(), 60, "the last thread's name")
        process.kill()


@pytest.mark.parametrize(
    ("before", "now", "leaked"),
    [
        ({"python": 2}, {"python": 2}, []),
        ({"python": 2}, {"python": 1, "kv-memory": 8}, []),  # a pool fills
        ({"kv-memory": 4}, {"kv-memory": 9}, ["9 threads kv-memory, 4 before"]),
        ({"prefill": 1}, {"prefill": 1, "kv-send-load-1": 1}, ["1 threads kv-send-load-1, 0 before"]),
        ({"kv-127.0.0.1": 1}, {"kv-127.0.0.1": 2}, ["2 threads kv-127.0.0.1, 1 before"]),
    ],
)
def test_one_thread_more_than_before_is_a_leak_unless_its_pool_may_have_it(
    before: Mapping[str, int], now: Mapping[str, int], leaked: list[str]
) -> None:
    assert leaked_threads(before, now) == leaked
