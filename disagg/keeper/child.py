"""The process of one model, as its keeper sees it: start, watch, order, end; and what outlives the keeper of it.

Each process has a connection of its own to the keeper, so that the sign of life of one is never taken for another's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from disagg import logs
from disagg.api.base import InvalidValue
from disagg.api.names import KEEPER_VARIABLE, LOG_FILE_VARIABLE
from disagg.api.status import ProcessOrder, ProcessReport
from disagg.errors import FleetError
from disagg.files import replace_file

_READ_BYTES: Final = 1 << 16
_MAX_REPORT_BYTES: Final = 1 << 20
_MAX_TAIL_BYTES: Final = 1 << 16
_OF_A_MANAGER: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""What a service manager gives the keeper for itself."""
_SAME_START_S: Final = 2.0
_WORTH_A_SECOND: Final = 1 << 20
"""Bytes read of files that show as much as a second of CPU time that a process loads its model. Its event loop runs,
too, and takes less."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a process may be silent, in seconds. load_s: neither compute nor read anything while it loads. told_s:
    until the keeper states so. traces_s: from SIGABRT, at which it writes where its threads are, to SIGKILL. stop_s:
    from SIGTERM to SIGKILL."""

    silent_s: float = 90.0
    load_s: float = 120.0
    told_s: float = 10.0
    traces_s: float = 3.0
    stop_s: float = 27.0


@dataclass(frozen=True, slots=True)
class Failure:
    """How a process ended by itself. final: it will end so again."""

    reason: str
    final: bool


class Child:
    """The process. changed: is called when it has told something, or has closed its connection, which it does at its
    end. report: what it told last. ready_s: seconds from its start until it was ready. read_bytes: of files, by this
    load, as far as the system counts them."""

    def __init__(self, command: Sequence[str], log: Path, changed: Callable[[], None]) -> None:
        """Raises OSError if it cannot be started."""
        self._changed = changed
        self._unread = bytearray()
        self._number = 0
        self.report: ProcessReport | None = None
        self.ready_s: float | None = None
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._log, self._log_began = log, os.fstat(output).st_size
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
                env=_environment({LOG_FILE_VARIABLE: str(log), KEEPER_VARIABLE: str(theirs.fileno())}),
            )
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()
            os.close(output)
        self.started = self.heard = time.monotonic()
        self._killed_before = out_of_memory_kills()
        self._seen = psutil.Process(self._process.pid)
        self._work = 0.0
        self.resident = self.read_bytes = 0
        self.began = 0.0
        with suppress(psutil.Error):
            self.began = self._seen.create_time()
        asyncio.get_running_loop().add_reader(self._connection, self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def loaded(self) -> bool:
        return self.report is not None and self.report.load.status not in ("loading", "draining")

    @property
    def _loads(self) -> bool:
        return self.report is None or self.report.load.status == "loading"

    @property
    def occupied(self) -> bool:
        """Whether requests run on it or wait there."""
        return self.report is not None and self.report.load.running + self.report.load.queue > 0

    @property
    def refused(self) -> bool:
        """Whether it has refused the last order."""
        report = self.report
        return report is not None and report.answers == self._number > 0 and report.refused

    def ended(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._process.poll()

    def close(self) -> None:
        """It has ended."""
        if self._connection.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection.close()

    def order(self, *, drains: bool, cuts: bool = False) -> None:
        """Let it take no more requests and end. drains: after those that it has; cuts: it ends these; else it refuses
        if it has any."""
        self._number += 1
        with suppress(OSError):  # it ends, or is stopped: then it is ended for its silence
            self._connection.send(ProcessOrder(number=self._number, drains=drains, cuts=cuts).to_bytes() + b"\n")

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def excuse(self, now: float) -> None:
        """The keeper was stopped, and its processes perhaps too."""
        self.heard = now

    def watch(self, now: float) -> None:
        """Look at what it takes, and whether it does anything while it loads: itself, or processes that it has started,
        as an engine with several GPUs does."""
        with suppress(psutil.Error):
            self.resident = self._seen.memory_info().rss
            if self._loads:
                processes = [self._seen]
                with suppress(psutil.Error):
                    processes += self._seen.children(recursive=True)
                seconds, nbytes = _sums(processes)
                self.read_bytes = max(self.read_bytes, nbytes)
                work = seconds + nbytes / _WORTH_A_SECOND
                if work < self._work:  # a process that it had started has ended
                    self._work = work
                elif work >= self._work + 1.0:
                    self._work, self.heard = work, now

    def silent_s(self, now: float, patience: Patience) -> float:
        """For how long it has given no sign of life, if that is too long; else 0."""
        silent_s = now - self.heard
        return silent_s if silent_s > (patience.load_s if self._loads else patience.silent_s) else 0.0

    def silence(self, now: float, patience: Patience) -> str:
        """What is stated of a process that should have given a sign of life by now; empty if it has."""
        silent_s = now - self.heard
        if silent_s <= patience.told_s:
            return ""
        sign = "neither computed nor read anything" if self._loads else "given no sign of life"
        return f"its process has {sign} for {silent_s:.0f} s"

    def failure(self, code: int) -> Failure:
        """Why it has ended, from the last line of its log that says so."""
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else str(-code)
            if code == -signal.SIGKILL and out_of_memory_kills() > self._killed_before:
                return Failure("the kernel ended its process, because the machine was out of memory", final=True)
            return Failure(f"its process was ended by {name}: see {self._log}", final=False)
        for line in reversed(_tail(self._log, self._log_began)):
            with suppress(msgspec.DecodeError):
                fields: Any = msgspec.json.decode(line)
                if isinstance(fields, Mapping) and fields.get("code") and fields.get("message"):
                    hint = f" ({fields['hint']})" if fields.get("hint") else ""
                    return Failure(f"{fields['message']}{hint}"[:1900], final=fields.get("event") == "start_failed")
        return Failure(f"its process ended with exit code {code}: see {self._log}", final=False)

    def _read(self) -> None:
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._connection)
            self._changed()
            return
        if not self._loads:
            self.heard = time.monotonic()
        self._unread += data
        *lines, rest = bytes(self._unread).split(b"\n")
        self._unread[:] = rest if len(rest) < _MAX_REPORT_BYTES else b""
        before = self._seen_in(self.report)
        for line in filter(None, lines):
            with suppress(InvalidValue):
                self.report = ProcessReport.from_bytes(line)
        if self.loaded and self.ready_s is None:
            self.heard = time.monotonic()
            self.ready_s = self.heard - self.started
        if self._seen_in(self.report) != before:
            self._changed()

    @staticmethod
    def _seen_in(report: ProcessReport | None) -> object:
        """What of a report the keeper decides by at once."""
        if report is None:
            return None
        load = report.load
        return load.status, load.running + load.queue > 0, report.answers, report.counters.requests


def _sums(processes: Iterable[psutil.Process]) -> tuple[float, int]:
    """Seconds of CPU time that they have taken, and bytes that they have read of files, as far as the system counts
    these."""
    seconds, nbytes = 0.0, 0
    for process in processes:
        with suppress(psutil.Error, AttributeError):
            times = process.cpu_times()
            seconds += times.user + times.system
            counted = process.io_counters()
            nbytes += max(int(counted.read_bytes), int(getattr(counted, "read_chars", 0)))
    return seconds, nbytes


def out_of_memory_kills() -> int:
    """How many processes the Linux kernel has ended since boot for lack of memory; 0 elsewhere."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def end_orphan(pid: int, began: float) -> bool:
    """End a process that an earlier keeper has left, if it is still that one."""
    try:
        left = psutil.Process(pid)
        if abs(left.create_time() - began) > _SAME_START_S or "disagg.servers" not in left.cmdline():
            return False
        os.killpg(pid, signal.SIGKILL)
        psutil.wait_procs([left], timeout=5.0)
    except (psutil.Error, ProcessLookupError, PermissionError):
        return False
    return True


class Measured(msgspec.Struct, frozen=True):
    """Of a model's last load. config: what hosts.toml stated of it then, as served_digest has it."""

    load_s: float
    nbytes: int
    config: str


class _Started(msgspec.Struct, frozen=True):
    pid: int
    began: float


class _Text(msgspec.Struct):
    ports: dict[str, tuple[int, ...]] = {}
    measured: dict[str, Measured] = {}
    started: dict[str, _Started] = {}


class Records:
    """What the next keeper of this host has to know, in one file. One that cannot be read or written is logged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._text = msgspec.json.decode(path.read_bytes(), type=_Text)
        except FileNotFoundError:
            self._text = _Text()
        except (OSError, msgspec.MsgspecError) as error:
            self._text = _Text()
            logs.event(logging.WARNING, "keeper_record_lost", path=str(path), reason=str(error))

    @property
    def measured(self) -> Mapping[str, Measured]:
        return self._text.measured

    @property
    def ports(self) -> Mapping[str, tuple[int, ...]]:
        return self._text.ports

    def end_orphans(self) -> None:
        """End what an earlier keeper has left."""
        for model, left in self._text.started.items():
            if end_orphan(left.pid, left.began):
                logs.event(logging.WARNING, "orphan_ended", model=model, pid=left.pid)
        self._text.started.clear()
        self._write()

    def assign(self, models: Sequence[str], ports: range, each: int) -> Mapping[str, tuple[int, ...]]:
        """The ports of these models, `each` of them. Raises FleetError if there are too few."""
        self._text.ports = assigned(models, ports, each, self._text.ports)
        self._write()
        return self._text.ports

    def note(
        self,
        model: str,
        *,
        measured: Measured | None = None,
        started: Child | None = None,
        ended: bool = False,
    ) -> None:
        if measured is not None:
            self._text.measured[model] = measured
        if started is not None:
            self._text.started[model] = _Started(started.pid, started.began)
        if ended:
            self._text.started.pop(model, None)
        self._write()

    def _write(self) -> None:
        try:
            replace_file(self._path, msgspec.json.encode(self._text))
        except OSError as error:
            logs.event(logging.WARNING, "keeper_record_not_written", path=str(self._path), reason=str(error))


def assigned(
    models: Sequence[str], ports: range, each: int, before: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The ports of models. Whoever has some keeps them, also models that are no longer listed while there are enough
    for all that are. FleetError if there are too few."""
    if len(models) * each > len(ports):
        raise FleetError(
            f"{len(models)} models need {len(models) * each} ports, and {ports[0]}-{ports[-1]} are {len(ports)}",
            "give the host a larger range as `ports`",
        )
    fits = {
        model: known for model, known in before.items() if len(known) == each and all(port in ports for port in known)
    }
    kept = {model: known for model, known in fits.items() if model in models}
    others = {model: known for model, known in fits.items() if model not in models}
    missing = [model for model in models if model not in kept]
    while others and len(ports) - each * (len(kept) + len(others)) < each * len(missing):
        others.pop(next(iter(others)))
    taken = {port for known in (*kept.values(), *others.values()) for port in known}
    free = iter([port for port in ports if port not in taken])
    return {**kept, **others, **{model: tuple(next(free) for _ in range(each)) for model in missing}}


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name not in _OF_A_MANAGER}, **more}


def _tail(path: Path, began: int) -> list[bytes]:
    """The last lines of a log, without those that were there before."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(began if began <= size else 0, size - _MAX_TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []
