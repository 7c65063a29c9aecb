"""Programs that are forked from a process with their imports done, which saves seconds of each server's start.

That process is `python -m tests.preloaded`: see there. All processes of a test run share it: each connects to its
socket, and whoever finds none starts it. It ends when nobody is connected any more.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

_CLONE_NEWNET = 0x40000000
AVAILABLE = sys.platform == "linux"
READY = b"ready\n"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
ROOT = Path(__file__).parents[2]
RUN_VARIABLE = "PYTEST_XDIST_TESTRUNUID"


class ProcessEndedError(AssertionError):
    """The process with the imports has ended, and nobody tells how the programs fare that it has started."""


class Preloaded:
    """The process with the frameworks. Its servers compute with one thread. variables: of its environment. python: of
    the environment with `framework`. Processes of one run that ask for the same get the same."""

    def __init__(
        self,
        variables: Mapping[str, str] = MappingProxyType({}),
        python: str = sys.executable,
        framework: str = "transformers",
    ) -> None:
        self._lock = threading.Lock()
        self._command = [python, "-m", "tests.preloaded", framework]
        path = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
        self._environment = {**os.environ, **_ONE_THREAD, **variables, "PYTHONPATH": path}
        self._address = _address(self._command, variables)
        self._errors = self._address.with_suffix(".stderr")
        self._started: subprocess.Popen[bytes] | None = None
        self._connect()

    def _connect(self) -> None:
        self.generation = object()  # another one for each process that this object has had
        self._started = None
        self._connection = self._connected()
        self._lines = self._connection.makefile("rb")

    def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        network: str = "",
        program: str = "disagg.servers",
        *,
        errors: Path | None = None,
        input: Path | None = None,
    ) -> ForkedServer:
        """network: the file of a network namespace, "" for this thread's own. program: the module to run. errors:
        stderr, if not in the log. input: stdin, if any."""
        request = {
            "argv": list(argv),
            "cwd": str(Path.cwd()),
            "env": dict(environment),
            "errors": str(errors or log),
            "input": str(input or os.devnull),
            "log": str(log),
            "network": network or f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net",
            "program": program,
        }
        try:
            return ForkedServer(self, int(self.ask(request)["pid"]))
        except ProcessEndedError:  # the next tests get another one
            self.close()
            self._connect()
            return ForkedServer(self, int(self.ask(request)["pid"]))

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request. ProcessEndedError if there is nobody to answer."""
        with self._lock:
            try:
                self._connection.sendall(json.dumps(request).encode() + b"\n")
                line = self._lines.readline()
            except ConnectionError:
                line = b""
        if not line:
            raise ProcessEndedError(f"{' '.join(self._command)} has ended{self._its_end()}")
        answer = dict(json.loads(line))
        assert "error" not in answer, answer["error"]
        return answer

    def _its_end(self) -> str:
        """Its exit code, if this process has started it, and the last that it said."""
        code = self._started.poll() if self._started is not None else None
        said = self._errors.read_text(errors="replace")[-2000:] if self._errors.exists() else ""
        return ("" if code is None else f" with exit code {code}") + (f":\n{said}" if said else "")

    def close(self) -> None:
        """Kills the programs that this object started and that still run."""
        self._lines.close()
        self._connection.close()

    def _connected(self) -> socket.socket:
        """A connection to the process, once its imports are done."""
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                seen = file_identity(self._address)
                connection.connect(str(self._address))
                if connection.recv(len(READY)) == READY:
                    return connection
            except FileNotFoundError:
                self._launch()
            except ConnectionRefusedError:  # its process was killed
                remove_if_same(self._address, seen)
            except ConnectionResetError:  # it ended when this process connected
                pass
            connection.close()
            assert self._started is None or not self._started.poll(), "the process with the imports has failed"

    def _launch(self) -> None:
        """Start the process and wait until it, or one that was quicker, can be connected to."""
        null, command = subprocess.DEVNULL, [*self._command, str(self._address)]
        with self._errors.open("ab") as errors:  # pytest's own stderr is a file that each test has anew
            process = subprocess.Popen(
                command, stdin=null, stdout=subprocess.PIPE, stderr=errors, env=self._environment, cwd=ROOT
            )
        assert process.stdout is not None
        with process.stdout:
            listens = process.stdout.readline()
        if listens:
            self._started = process
        else:
            assert process.wait() == 0, "the process with the imports has failed"


class ForkedServer:
    """What tests use of a Popen, for a server that is not a child of this process."""

    def __init__(self, parent: Preloaded, pid: int) -> None:
        self._parent = parent
        self._generation = parent.generation
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            if self._generation is not self._parent.generation:
                raise ProcessEndedError(f"the process that has started {self.pid} has ended")
            self.returncode = self._parent.ask({"pid": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline, pause = time.monotonic() + timeout, 0.002
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("disagg", timeout)
            time.sleep(pause)
            pause = min(0.05, pause * 1.3)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def enter_network(descriptor: int) -> None:  # os.setns is from Python 3.12 on
    """Move this thread into a network namespace. Threads and processes inherit it from their maker."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def file_identity(path: Path) -> tuple[int, int]:
    """Of the file that a name stands for now; another one gets the same name later."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def remove_if_same(path: Path, identity: tuple[int, int]) -> None:
    """Remove a file unless another process has replaced it. They take turns."""
    turn = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if file_identity(path) == identity:
                path.unlink()
    finally:
        os.close(turn)


def run_id() -> str:
    """The same in all processes of one run of pytest-xdist."""
    return os.environ.get(RUN_VARIABLE, str(os.getpid()))


def _address(command: Sequence[str], variables: Mapping[str, str]) -> Path:
    """Of the socket: the same in all processes of one run."""
    run = run_id()
    wanted = zlib.crc32(json.dumps([run, command, dict(variables)]).encode())
    return Path(tempfile.gettempdir(), f"disagg-tests-{run[:12]}-{wanted:08x}.sock")
