"""The supervisor with real processes: a small script stands for the server."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import disagg.fleet.services.supervise as module
from tests.deadlines import LONG_S, ends_by_itself, wait_until
from tests.programs import needs

SUPERVISE = Path(module.__file__)
pytestmark = needs("ps")


@dataclass
class Folder:
    """A host's folder, whose `run` is a shell script."""

    path: Path
    program: Path = SUPERVISE

    def change(self, old: str, new: str) -> None:
        """Have a supervisor with another constant."""
        source = SUPERVISE.read_text()
        assert old in source
        self.program = self.path / "supervise.py"
        self.program.write_text(source.replace(old, new))

    def serve(self, script: str) -> None:
        (self.path / "current").mkdir(exist_ok=True)
        (self.path / "logs").mkdir(exist_ok=True)
        (self.path / "current/run").write_text(script)

    def call(self, verb: str) -> dict[str, Any]:
        argv = [sys.executable, "-P", str(self.program), verb, str(self.path)]
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


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
    wait_until(lambda: folder.log().count("up ") == 2)
    wait_until(lambda: folder.call("status")["child"] != child)  # the server may print before its supervisor notes it
    state = folder.call("status")
    assert state["restarts"] == 1 and state["last_exit"] == -9
    line = next(json.loads(line) for line in folder.log().splitlines() if "server_ended" in line)
    assert (line["level"], line["exit"], line["restart_in_s"]) == ("error", -9, 1.0)


def test_a_server_that_crashes_at_start_is_tried_again_after_longer_and_longer(folder: Folder) -> None:
    folder.change("FIRST_DELAY_S = 1.0", "FIRST_DELAY_S = 0.1")
    folder.serve("exit 3")
    folder.call("start")
    wait_until(lambda: folder.log().count("server_ended") == 4)
    delays = [json.loads(line)["restart_in_s"] for line in folder.log().splitlines()]
    assert delays[:4] == [0.1, 0.2, 0.4, 0.8]


def test_a_supervisor_that_waits_for_the_next_start_is_stopped_at_once(folder: Folder) -> None:
    folder.change("FIRST_DELAY_S = 1.0", f"FIRST_DELAY_S = {LONG_S}")
    folder.serve("exit 3")
    folder.call("start")
    wait_until(lambda: "server_ended" in folder.log())
    with ends_by_itself():
        folder.call("stop")


NOTIFYING = """\
import os, socket, sys, time
print("up", os.getpid(), flush=True)
notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notices.connect(os.environ["NOTIFY_SOCKET"])
notices.send(b"READY=1\\nWATCHDOG_USEC=" + sys.argv[2].encode())
for _ in range(int(sys.argv[1])):
    time.sleep(0.1)
    notices.send(b"WATCHDOG=1")
time.sleep(1000)
"""


def notifying(folder: Folder, times: int, within_s: float) -> None:
    """Serve a program that announces a notification within `within_s` and sends one every 0.1 s, so many times."""
    (folder.path / "notifying.py").write_text(NOTIFYING)
    folder.serve(f"exec {shlex.join([sys.executable, str(folder.path / 'notifying.py')])} {times} {within_s * 1e6:.0f}")


def test_a_server_that_hangs_as_a_whole_is_restarted(folder: Folder) -> None:
    notifying(folder, times=10, within_s=0.7)
    first = folder.call("start")
    wait_until(lambda: folder.log().count("up ") >= 2)
    hung, ended, *_ = (json.loads(line) for line in folder.log().splitlines() if line.startswith("{"))
    assert hung["event"] == "server_hangs" and "it hung as a whole" in hung["message"]
    assert (ended["event"], ended["exit"]) == ("server_ended", -signal.SIGABRT) and not alive(first["child"])
    assert ended["time"] > hung["time"] or ended["restarts"] == 1


def test_a_frozen_server_is_restarted(folder: Folder) -> None:
    folder.change("TRACES_S = 3.0", "TRACES_S = 0.5")
    notifying(folder, times=100_000, within_s=3)
    first = folder.call("start")
    wait_until(lambda: "up " in folder.log())
    os.kill(first["child"], signal.SIGSTOP)
    wait_until(lambda: folder.log().count("up ") >= 2)
    assert folder.call("status")["last_exit"] == -signal.SIGKILL and not alive(first["child"])


def test_a_server_that_notifies_is_left_alone(folder: Folder) -> None:
    notifying(folder, times=100_000, within_s=3)
    first = folder.call("start")
    time.sleep(4)
    state = folder.call("status")
    assert (state["child"], state["restarts"]) == (first["child"], 0)


def test_a_line_of_the_supervisor_is_in_the_log_that_the_server_began_anew(folder: Folder) -> None:
    folder.serve(f"mv {folder.path}/logs/server.log {folder.path}/logs/server.log.1; exit 3")
    folder.call("start")
    wait_until(lambda: (folder.path / "logs/server.log").exists() and "server_ended" in folder.log())


@pytest.mark.parametrize(
    ("code", "out_of_memory", "message"),
    [
        (0, True, None),
        (3, True, None),
        (-9, True, "the kernel ended it, because the machine was out of memory"),
        (-9, False, "it was ended by signal 9"),
        (-11, True, "it was ended by signal 11"),
    ],
)
def test_the_reason_of_an_end_that_leaves_no_line_is_logged(
    code: int, out_of_memory: bool, message: str | None
) -> None:
    assert module._reason(code, out_of_memory).get("message") == message


def test_the_next_start_runs_the_release_that_is_current_then(folder: Folder) -> None:
    child = folder.call("start")["child"]
    folder.serve("echo newer; exec sleep 1000")
    os.killpg(child, signal.SIGKILL)
    wait_until(lambda: "newer" in folder.log())


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
    wait_until(lambda: not alive(first["pid"]))
    assert alive(first["child"])
    second = folder.call("start")
    assert second["running"] and not alive(first["child"])


def test_a_server_that_ends_while_it_is_looked_for_is_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid may be another process's by then."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    served = (ended.pid, ended.pid, f"python --config {tmp_path.resolve()}/releases/{'a' * 16}/hosts.toml")
    monkeypatch.setattr(module, "_processes", lambda: [served])
    monkeypatch.setattr(module, "_signal_group", lambda pid, number: pytest.fail("a process that has ended"))
    module._end_orphan(tmp_path)


def test_a_line_that_a_full_disk_refuses_leaves_no_descriptor_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = object.__new__(module._Supervisor)  # without its signals
    supervisor._folder = tmp_path
    opened: list[int] = []

    def full(folder: Path) -> int:
        opened.append(os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC))
        return opened[-1]

    monkeypatch.setattr(module, "_open_log", full)
    supervisor._log("server_ended")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_without_room_for_its_record_no_server_is_started(folder: Folder) -> None:
    (folder.path / "supervisor.json").mkdir()  # stands for a full disk: the record can be written nowhere
    with pytest.raises(subprocess.CalledProcessError) as failed:
        folder.call("start")
    assert "the supervisor cannot start" in failed.value.stderr and "supervisor.json" in failed.value.stderr
    assert not folder.call("status")["running"] and "up " not in folder.log()


def test_a_supervisor_that_cannot_write_its_record_survives_and_is_found_to_be_stopped(folder: Folder) -> None:
    first = folder.call("start")
    (folder.path / "supervisor.json").unlink()
    (folder.path / "supervisor.json").mkdir()
    os.killpg(first["child"], signal.SIGKILL)
    wait_until(lambda: folder.log().count("up ") == 2, seconds=60)
    assert alive(first["pid"])
    second = int(folder.log().split("up ")[-1].split()[0])
    assert not folder.call("stop")["running"]
    assert not alive(first["pid"]) and not alive(second)


def test_a_server_that_is_deaf_to_sigterm_is_killed(folder: Folder) -> None:
    folder.change("GRACE_S = 30.0", "GRACE_S = 1.0")
    folder.serve("trap '' TERM; echo deaf; while :; do sleep 1; done")
    child = folder.call("start")["child"]
    wait_until(lambda: "deaf" in folder.log())
    folder.call("stop")
    assert not alive(child)


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = f"import runpy, sys; sys.argv = ['x', 'status', '/nowhere']; runpy.run_path({str(SUPERVISE)!r})"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=20)
