"""What student code cannot do. Each case is one notebook of one cell, run in the real sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import nbformat
import pytest

from grader.rubric import Limits
from grader.sandbox import CellRun, execute

LIMITS = Limits(cell_seconds=120, notebook_seconds=600, memory_bytes=1 << 30, file_bytes=1 << 20)

HOSTILE = f"""
import os, pathlib, resource, socket, subprocess
from ipykernel.connect import get_connection_file

def attempt(name, action):
    try:
        print(name, 'done', action())
    except BaseException as error:
        print(name, type(error).__name__)

attempt('connect', lambda: socket.create_connection(('127.0.0.1', 22), 5))
attempt('resolve', lambda: socket.getaddrinfo('example.org', 80))
attempt('read grader', lambda: pathlib.Path({str(Path(__file__).parents[2] / "pyproject.toml")!r}).read_text())
attempt('list grader', lambda: os.listdir({str(Path(__file__).parent)!r}))
attempt('write system', lambda: open('/usr/lib/x', 'w'))
attempt('write packages', lambda: open(os.path.dirname(os.__file__) + '/x', 'w'))
attempt('large file', lambda: open('x', 'wb').write(bytes(1 << 21)))
attempt('memory', lambda: len(bytearray(2 << 30)))
attempt('see processes', lambda: os.kill({os.getpid()}, 0))
attempt('raise limit', lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40)))
attempt('mount', lambda: subprocess.run(['mount', '-t', 'tmpfs', 'none', '/tmp'], check=True, capture_output=True))
attempt('namespace', lambda: subprocess.run(['unshare', '-U', 'true'], check=True, capture_output=True))
attempt('fill the disk', lambda: open(os.path.dirname(get_connection_file()) + '/x', 'w'))
attempt('environment', lambda: [name for name in os.environ if 'SECRET' in name])
print('home', sorted(name for name in os.listdir() if not name.startswith('.')))
"""


def run(source: str, limits: Limits = LIMITS) -> CellRun:
    content: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    return execute(content, (), limits).cells[0]


def test_student_code_has_no_network_no_files_of_others_and_no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_SECRET", "x")
    ran = run(HOSTILE)
    assert ran.text.splitlines() == [
        "connect OSError",
        "resolve gaierror",
        "read grader FileNotFoundError",
        "list grader FileNotFoundError",
        "write system OSError",
        "write packages OSError",
        "large file OSError",
        "memory MemoryError",
        "see processes ProcessLookupError",
        "raise limit ValueError",
        "mount CalledProcessError",
        "namespace CalledProcessError",
        "fill the disk OSError",
        "environment done []",
        "home ['x']",
    ]


def test_a_kernel_that_ends_itself_fails_its_cell_only() -> None:
    content: Any = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in ("value = 4", "import os\nos._exit(3)", "print(1)")]
    )
    execution = execute(content, ("value",), LIMITS)
    assert [one.state for one in execution.cells] == ["ran", "not run", "not run"]
    assert execution.stopped == "kernel ended" and execution.variables["value"].kind == "number"


def test_a_kernel_that_ignores_interrupts_is_ended_at_the_notebooks_limit() -> None:
    source = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    content: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    execution = execute(content, (), Limits(cell_seconds=5, notebook_seconds=7))
    assert execution.stopped == "time" and execution.cells[0].state == "not run"


FORK = """
import os, time
for _ in range({processes}):
    if os.fork() == 0:
        block = b'x' * {each}
        time.sleep(600)
time.sleep(600)
"""


def test_processes_that_use_too_much_memory_together_are_ended() -> None:
    content: Any = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(FORK.format(processes=12, each=128 << 20))]
    )
    execution = execute(content, (), LIMITS)
    assert (execution.stopped, execution.cells[0].state) == ("memory", "not run")


def test_a_notebook_has_no_more_processes_than_its_limit() -> None:
    content: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(FORK.format(processes=200, each=1))])
    execution = execute(content, (), LIMITS)
    # The system refuses the process, unless the grader runs as root: then the jail ends all of them.
    assert execution.stopped == "memory" or "BlockingIOError" in execution.cells[0].error


def test_an_assignment_among_the_files_that_student_code_sees_looks_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assignment = tmp_path / "site-packages" / "assignment"
    (assignment / "data").mkdir(parents=True)
    (assignment / "data" / "x.csv").write_text("1")
    (assignment / "solution.ipynb").write_text("{}")
    monkeypatch.syspath_prepend(str(assignment.parent))
    source = (
        f"import os\nprint(os.listdir({str(assignment.parent)!r}), os.listdir({str(assignment)!r}), os.listdir('data'))"
    )
    content: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    execution = execute(content, (), LIMITS, assignment / "data")
    assert execution.cells[0].text == "['assignment'] [] ['x.csv']\n"


ENDLESS = """
import nbformat
from grader.rubric import Limits
from grader.sandbox import execute
execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("while True: pass")]), (), Limits(cell_seconds=600))
"""


def test_a_kernel_does_not_outlive_the_grader() -> None:
    grader = subprocess.Popen([sys.executable, "-c", ENDLESS])
    try:
        (jail,) = eventually(lambda: children(grader.pid))
        (kernel,) = eventually(lambda: children(jail))
    finally:
        grader.kill()
        grader.wait()
    eventually(lambda: not Path(f"/proc/{kernel}").exists())


def children(process: int) -> list[int]:
    return [
        int(child) for path in Path(f"/proc/{process}/task").glob("*/children") for child in path.read_text().split()
    ]


Found = TypeVar("Found")


def eventually(look: Callable[[], Found], deadline_s: float = 120) -> Found:
    """What `look` finds, once it is something."""
    deadline = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
