"""Run one server and restart it when it ends: `supervise.py start|stop|restart|status FOLDER`, on the host itself.

Runs FOLDER/current/run. After a crash it waits 1, 2, 4 ... 60 s before the next start, and 1 s again once a server has
run for a minute. Standard library only: it is run by path, and must not import the package beside it.

FOLDER/supervisor.lock   locked while the supervisor runs
FOLDER/supervisor.json   {"pid", "child", "child_began", "restarts", "last_exit"}
FOLDER/logs/server.log   the server's log, with a JSON line per restart
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

GRACE_S = 30.0
"""From SIGTERM to SIGKILL: longer than a server needs to finish its requests."""
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
STEADY_S = 60.0


def main(arguments: list[str]) -> int:
    verb, folder = arguments[0], Path(arguments[1])
    if verb in ("stop", "restart"):
        stop(folder)
    if verb in ("start", "restart"):
        start(folder)
    sys.stdout.write(json.dumps(status(folder)) + "\n")
    return 0


def status(folder: Path) -> dict[str, Any]:
    """The supervisor's record (supervisor.json), and whether it runs."""
    return {**_record(folder), "running": _running(folder)}


def start(folder: Path) -> None:
    """Start a detached supervisor, unless one runs. Returns once it has started the server."""
    if _running(folder):
        return
    _end_orphan(folder)
    reader, writer = os.pipe()
    if (first := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(reader)
            _detach(folder)
            os._exit(_supervise(folder, writer))
        os._exit(0)
    os.close(writer)
    os.waitpid(first, 0)
    with os.fdopen(reader, "rb") as pipe:
        pipe.read(1)  # end of file: it has written its record, or has ended


def stop(folder: Path) -> None:
    """Stop the supervisor and its server, and wait until they have ended."""
    if _running(folder):
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(_record(folder)["pid"], signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S + 10
        while _running(folder):
            if time.monotonic() > deadline:
                raise SystemExit("the supervisor did not end after SIGTERM")
            time.sleep(0.05)
    _end_orphan(folder)


def _detach(folder: Path) -> None:
    os.chdir(folder)
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(folder / "logs" / "server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)


def _supervise(folder: Path, ready: int) -> int:
    lock = os.open(folder / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another supervisor has started meanwhile
        return 0
    _Supervisor(folder).run(ready)
    return 0


class _Supervisor:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._woken, self._wake = os.pipe()  # written by the signal handler, to end the wait between two starts
        self._restarts = 0
        self._last_exit: int | None = None

    def run(self, ready: int) -> None:
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGALRM, self._kill)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        delay = FIRST_DELAY_S
        while not self._stopping:
            began = time.monotonic()
            self._start_child()
            if ready >= 0:
                os.close(ready)
                ready = -1
            self._last_exit = self._child.wait() if self._child else None
            if self._stopping:
                break
            delay = FIRST_DELAY_S if time.monotonic() - began > STEADY_S else delay
            self._restarts += 1
            self._write_record()
            self._log("server_ended", exit=self._last_exit, restart_in_s=delay, restarts=self._restarts)
            select.select([self._woken], [], [], delay)
            delay = min(delay * 2, LONGEST_DELAY_S)
        signal.alarm(0)
        self._child = None
        self._write_record()

    def _start_child(self) -> None:
        run = str(self._folder / "current" / "run")
        self._child = subprocess.Popen(["/bin/sh", run], stdin=subprocess.DEVNULL, start_new_session=True)
        self._write_record()
        if self._stopping:  # the signal arrived while there was no child to pass it on to
            self._stop()

    def _stop(self, *_: object) -> None:
        self._stopping = True
        os.write(self._wake, b"!")
        self._signal(signal.SIGTERM)
        signal.alarm(int(GRACE_S))

    def _kill(self, *_: object) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._child is not None and self._child.returncode is None:
            _signal_group(self._child.pid, number)

    def _write_record(self) -> None:
        child = self._child.pid if self._child else None
        record = {
            "pid": os.getpid(),
            "child": child,
            "child_began": _began(child) if child else "",
            "restarts": self._restarts,
            "last_exit": self._last_exit,
        }
        part = self._folder / f".supervisor.json.{os.getpid()}"
        part.write_text(json.dumps(record) + "\n", encoding="utf-8")
        part.replace(self._folder / "supervisor.json")

    def _log(self, name: str, **fields: Any) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        line = json.dumps({"time": stamp, "level": "error", "event": name, **fields})
        os.write(2, line.encode() + b"\n")


def _end_orphan(folder: Path) -> None:
    """End a server whose supervisor was killed: it would occupy the port of the next server."""
    record = _record(folder)
    child, began = record.get("child"), record.get("child_began")
    if not isinstance(child, int) or not began:
        return
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
        if _began(child) != began:
            return
        _signal_group(child, number)
        deadline = time.monotonic() + patience
        while _began(child) == began and time.monotonic() < deadline:
            time.sleep(0.1)


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it has just ended
        return


def _began(pid: int) -> str:
    """A process's start time from ps: distinguishes it from a later one with the same pid. "" for none or a zombie."""
    argv = ["ps", "-p", str(pid), "-o", "stat=,lstart="]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    state, _, began = done.stdout.strip().partition(" ")
    return "" if state.startswith("Z") else began.strip()


def _running(folder: Path) -> bool:
    try:
        lock = os.open(folder / "supervisor.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / "supervisor.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
