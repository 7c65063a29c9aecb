"""Run one server and restart it when it ends: `supervise.py start|stop|restart|status FOLDER`, on the host itself.

Runs FOLDER/running/run, or FOLDER/current/run if there is no such link. After a crash it waits 1, 2, 4 ... 60 s before
the next start, and 1 s again once a server has run for a minute. A server that has stated a WATCHDOG_USEC, as in
sd_notify(3), and sends no notification for so long is ended: its whole process hangs.
Standard library only: it is run by path, and must not import the package beside it.

FOLDER/supervisor.lock   locked while the supervisor runs
FOLDER/supervisor.json   {"pid", "child", "child_began", "restarts", "last_exit"}
FOLDER/notify.sock       where the server notifies
FOLDER/logs/server.log   the server's log, with a JSON line per restart
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
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
"""After a run as long as this, the next delay is FIRST_DELAY_S again."""
STOPPED_S = 5.0
"""A wait that lasts this much longer than asked for: this process, or its machine, was stopped meanwhile."""
TRACES_S = 3.0
"""From SIGABRT, at which a server writes where its threads are, to SIGKILL."""


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
            os._exit(_supervise(folder, writer))
        os._exit(0)
    os.close(writer)
    os.waitpid(first, 0)
    with os.fdopen(reader, "rb") as pipe:
        if refusal := pipe.read().decode():  # ends once it has started the server, or has ended
            raise SystemExit(refusal)


def stop(folder: Path) -> None:
    """Stop the supervisor and its server, and wait until they have ended."""
    if _running(folder):
        with suppress(ProcessLookupError):  # it has just ended
            for supervisor in _supervisors(folder):
                os.kill(supervisor, signal.SIGTERM)
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
    log = _open_log(folder)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)


def _open_log(folder: Path) -> int:
    return os.open(folder / "logs" / "server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _supervise(folder: Path, ready: int) -> int:
    """Supervise until SIGTERM. Whatever it needs to be found by is written before there is a server."""
    try:
        _detach(folder)
        lock = os.open(folder / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        supervisor = _Supervisor(folder)
        supervisor.write_record()
    except BlockingIOError:  # another supervisor has started meanwhile
        return 0
    except OSError as error:
        os.write(ready, f"the supervisor cannot start: {error}".encode())
        return 1
    supervisor.run(ready)
    return 0


class _Supervisor:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._notices = _Notices(folder / "notify.sock")
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
        signal.signal(signal.SIGCHLD, lambda *_: None)  # ends the wait for a notice
        delay = FIRST_DELAY_S
        while not self._stopping:
            began, killed_before = time.monotonic(), _out_of_memory_kills()
            self._start_child()
            if ready >= 0:
                os.close(ready)
                ready = -1
            self._last_exit = self._wait_child() if self._child else None
            if self._stopping:
                break
            delay = FIRST_DELAY_S if time.monotonic() - began > STEADY_S else delay
            self._restarts += 1
            self._update_record()
            reason = _reason(self._last_exit, _out_of_memory_kills() > killed_before)
            self._log("server_ended", exit=self._last_exit, restart_in_s=delay, restarts=self._restarts, **reason)
            select.select([self._woken], [], [], delay)
            delay = min(delay * 2, LONGEST_DELAY_S)
        signal.alarm(0)
        self._child = None
        self._update_record()

    def _start_child(self) -> None:
        running = self._folder / "running" / "run"
        run = str(running if running.exists() else self._folder / "current" / "run")
        self._child = subprocess.Popen(
            ["/bin/sh", run], stdin=subprocess.DEVNULL, start_new_session=True, env=self._notices.environment()
        )
        self._update_record()
        if self._stopping:  # the signal arrived while there was no child to pass it on to
            self._stop()

    def _wait_child(self) -> int | None:
        """The exit code of the server, once it has ended. Ends one that hangs."""
        assert self._child is not None
        while self._child.poll() is None:
            self._notices.wait(1.0)
            if (silent_s := self._notices.overdue()) and not self._stopping:
                message = f"it hung as a whole: no notice of it for {silent_s:.0f} s"
                self._log("server_hangs", message=message, hint="the traces below show where")
                self._signal(signal.SIGABRT)
                with suppress(subprocess.TimeoutExpired):
                    self._child.wait(TRACES_S)
                self._signal(signal.SIGKILL)
                return self._child.wait()
        return self._child.returncode

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

    def _update_record(self) -> None:
        """A full disk must not end the supervisor: its record names it already, and the process table its server."""
        with suppress(OSError):
            self.write_record()

    def write_record(self) -> None:
        """Raises OSError if there is no room for it, not even in its present place."""
        child = self._child.pid if self._child else None
        record = {
            "pid": os.getpid(),
            "child": child,
            "child_began": _began(child) if child else "",
            "restarts": self._restarts,
            "last_exit": self._last_exit,
        }
        text, path = json.dumps(record) + "\n", self._folder / "supervisor.json"
        part = path.with_name(f".supervisor.json.{os.getpid()}")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            if not path.is_file():
                raise
            with path.open("r+", encoding="utf-8") as present:  # on a full disk: it has its block already
                present.write(text)
                present.truncate()

    def _log(self, name: str, **fields: Any) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        line = json.dumps({"time": stamp, "level": "error", "event": name, **fields})
        with suppress(OSError):  # a full disk must not end the supervisor
            log = _open_log(self._folder)  # opened anew: the server rotates it
            try:
                os.write(log, line.encode() + b"\n")
            finally:
                os.close(log)


class _Notices:
    """What a server sends to $NOTIFY_SOCKET, as in sd_notify(3): WATCHDOG_USEC, the longest time until its next
    notification, then WATCHDOG=1 now and then. Without a socket nothing is overdue."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._limit_s = float("inf")
        self._at = 0.0
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # a signal, such as SIGCHLD, ends the wait
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with suppress(OSError):  # e.g. the path is too long for a socket
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))

    def environment(self) -> dict[str, str]:
        """The environment of a new server, of which nothing is known yet."""
        self._limit_s = float("inf")
        return {**os.environ, "NOTIFY_SOCKET": str(self._path)}

    def wait(self, seconds: float) -> None:
        """Read what has arrived; return after a notice, a signal, or this long."""
        began = time.monotonic()
        select.select([self._socket.fileno(), self._woken], [], [], seconds)
        if time.monotonic() - began > seconds + STOPPED_S:  # this process was stopped, and the server perhaps too
            self._at = time.monotonic()
        with suppress(BlockingIOError):
            os.read(self._woken, 1024)
        with suppress(OSError):
            while True:
                self._read(self._socket.recv(4096).decode("utf-8", "replace"))

    def overdue(self) -> float:
        """The seconds for which there was no notice, if that is too long; else 0."""
        silent_s = time.monotonic() - self._at
        return silent_s if silent_s > self._limit_s else 0.0

    def _read(self, notice: str) -> None:
        self._at = time.monotonic()
        for line in notice.splitlines():
            name, _, value = line.partition("=")
            if name == "WATCHDOG_USEC" and value.isdigit():
                self._limit_s = int(value) / 1e6


def _reason(code: int | None, out_of_memory: bool) -> dict[str, str]:
    """Why a server ended, if its exit code states it: a signal leaves no line of its own in the log."""
    if code is None or code >= 0:
        return {}
    if code == -signal.SIGKILL and out_of_memory:
        hint = "give the model less memory: a lower max_kv_bytes or context, smaller weights, or another machine"
        return {"message": "the kernel ended it, because the machine was out of memory", "hint": hint}
    return {"message": f"it was ended by signal {-code}", "hint": "the lines before this one may say why"}


def _out_of_memory_kills() -> int:
    """How many processes the Linux kernel has ended since boot for lack of memory; 0 elsewhere."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _end_orphan(folder: Path) -> None:
    """End servers whose supervisor was killed: one would occupy the port of the next server. The record may be lost."""
    record = _record(folder)
    child, began = record.get("child"), record.get("child_began")
    if isinstance(child, int) and began:
        _end(child, began)
    served = f"--config {folder.resolve()}/releases/"
    for pid, group, arguments in _processes():
        if pid == group and served in arguments and (began := _began(pid)):  # else it has just ended
            _end(pid, began)


def _end(child: int, began: str) -> None:
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
    """A process's start time from ps: distinguishes it from a later one with the same pid. "" for none or a zombie.

    A zombie with threads ("l") still holds its ports.
    """
    argv = ["ps", "-p", str(pid), "-o", "stat=,lstart="]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    state, _, began = done.stdout.strip().partition(" ")
    return "" if state.startswith("Z") and "l" not in state else began.strip()


def _supervisors(folder: Path) -> list[int]:
    """The supervisor of this folder by its record, or by the process table if its record is lost."""
    processes = _processes()
    ends = tuple(f"supervise.py {verb} {folder}" for verb in ("start", "restart"))
    ours = [pid for pid, _, arguments in processes if arguments.endswith(ends)]
    recorded = _record(folder).get("pid")
    return [recorded] if recorded in ours else [pid for pid in ours if pid != os.getpid()]


def _processes() -> list[tuple[int, int, str]]:
    """Pid, process group and command line of all processes."""
    argv = ["ps", "-axww", "-o", "pid=", "-o", "pgid=", "-o", "args="]
    lines = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False).stdout.splitlines()
    fields = (line.split(None, 2) for line in lines)
    return [(int(one[0]), int(one[1]), one[2]) for one in fields if len(one) == 3]


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
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
