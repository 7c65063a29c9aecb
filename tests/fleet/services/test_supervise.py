"""The supervisor with real processes: a small script stands for the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import disagg.fleet.services.supervise as module
from tests.deadlines import ends_by_itself

SUPERVISE = Path(module.__file__)


@dataclass
class Folder:
    """A host's folder, whose `run` is a shell script."""

    path: Path

    def serve(self, script: str) -> None:
        (self.path / "current").mkdir(exist_ok=True)
        (self.path / "logs").mkdir(exist_ok=True)
        (self.path / "current/run").write_text(script)

    def call(self, verb: str) -> dict[str, Any]:
        argv = [sys.executable, "-P", str(SUPERVISE), verb, str(self.path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        return dict(json.loads(done.stdout))

    def log(self) -> str:
        return (self.path / "logs/server.log").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    made.serve("echo up $$; exec sleep 1000")
    yield made
    made.call("stop")


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    done = subprocess.run(["ps", "-p", str(pid), "-o", "stat="], capture_output=True, text=True, check=False)
    return "Z" not in done.stdout


def test_it_starts_once_detached_and_stops(folder: Folder) -> None:
    first = folder.call("start")
    assert first["running"] and alive(first["child"])
    assert os.getsid(first["pid"]) not in (os.getsid(0), first["child"]), "a session of its own"
    assert folder.call("start")["pid"] == first["pid"]
    stopped = folder.call("stop")
    assert not stopped["running"] and stopped["child"] is None
    assert not alive(first["pid"]) and not alive(first["child"])
    assert folder.call("stop")["running"] is False


def test_a_killed_server_is_back_and_the_log_says_so(folder: Folder) -> None:
    child = folder.call("start")["child"]
    os.killpg(child, signal.SIGKILL)
    wait_for(lambda: folder.log().count("up ") == 2)
    state = folder.call("status")
    assert state["restarts"] == 1 and state["last_exit"] == -9 and state["child"] != child
    line = next(json.loads(line) for line in folder.log().splitlines() if "server_ended" in line)
    assert (line["level"], line["exit"], line["restart_in_s"]) == ("error", -9, 1.0)


def test_a_server_that_crashes_at_start_is_tried_again_after_longer_and_longer(folder: Folder) -> None:
    folder.serve("exit 3")
    folder.call("start")
    wait_for(lambda: folder.log().count("server_ended") == 3)
    delays = [json.loads(line)["restart_in_s"] for line in folder.log().splitlines()]
    assert delays == [1.0, 2.0, 4.0]
    with ends_by_itself(4):
        folder.call("stop")


def test_the_next_start_runs_the_release_that_is_current_then(folder: Folder) -> None:
    child = folder.call("start")["child"]
    folder.serve("echo newer; exec sleep 1000")
    os.killpg(child, signal.SIGKILL)
    wait_for(lambda: "newer" in folder.log())


def test_restart_changes_supervisor_and_server(folder: Folder) -> None:
    first = folder.call("start")
    second = folder.call("restart")
    assert second["running"] and {first["pid"], first["child"]}.isdisjoint({second["pid"], second["child"]})


def test_a_supervisor_that_ends_by_itself_just_then_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / "supervisor.json").write_text(json.dumps({"pid": ended.pid}))
    seen = iter([True, False])
    monkeypatch.setattr(module, "_running", lambda folder: next(seen))
    module.stop(tmp_path)


def test_a_server_whose_supervisor_was_killed_does_not_stay_in_the_way(folder: Folder) -> None:
    first = folder.call("start")
    os.kill(first["pid"], signal.SIGKILL)
    wait_for(lambda: not alive(first["pid"]))
    assert alive(first["child"])
    second = folder.call("start")
    assert second["running"] and not alive(first["child"])


def test_a_server_that_is_deaf_to_sigterm_is_killed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SUPERVISE.read_text().replace("GRACE_S = 30.0", "GRACE_S = 1.0")
    (folder.path / "supervise.py").write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "SUPERVISE", folder.path / "supervise.py")
    folder.serve("trap '' TERM; echo deaf; while :; do sleep 1; done")
    child = folder.call("start")["child"]
    wait_for(lambda: "deaf" in folder.log())
    folder.call("stop")
    assert not alive(child)


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = f"import runpy, sys; sys.argv = ['x', 'status', '/nowhere']; runpy.run_path({str(SUPERVISE)!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=20)
