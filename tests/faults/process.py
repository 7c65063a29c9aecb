"""Faults of a server's process, by its id, and what it holds. Linux."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.threads import threads_by_name


@dataclass(frozen=True, slots=True)
class Held:
    """What a process has open. threads: by name. resident: bytes of memory."""

    threads: Mapping[str, int]
    sockets: int
    files: int
    resident: int

    @property
    def thread_count(self) -> int:
        return sum(self.threads.values())


def held(pid: int) -> Held:
    """What the process has open now."""
    targets = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            targets.append(str(descriptor.readlink()))
    sockets = sum(target.startswith("socket:") for target in targets)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Held(threads_by_name(pid), sockets, len(targets) - sockets, pages * resource.getpagesize())


def kill(pid: int) -> None:
    """SIGKILL, also to a frozen process."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    """SIGSTOP: its sockets stay open and accept connections, and nothing answers."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def freeze_for(pid: int, seconds: float) -> threading.Thread:
    """Freeze it now and thaw it after `seconds`."""
    freeze(pid)

    def end() -> None:
        time.sleep(seconds)
        thaw(pid)

    thread = threading.Thread(target=end, name=f"thaw {pid}", daemon=True)
    thread.start()
    return thread


@contextmanager
def limited(pid: int, kind: int, value: int) -> Iterator[None]:
    """A resource limit (resource.RLIMIT_...) of a running process, undone at the end."""
    _, hard = before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (value, hard))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, kind, before)


@contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """Every accept and open of the process fails with EMFILE."""
    with limited(pid, resource.RLIMIT_NOFILE, 3):
        yield


@contextmanager
def without_memory(pid: int, spare: int = 0) -> Iterator[None]:
    """New mappings of the process beyond `spare` bytes fail."""
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    with limited(pid, resource.RLIMIT_AS, size + spare):
        yield


@contextmanager
def without_disk(pid: int) -> Iterator[None]:
    """Files cannot grow: writing more than a byte of a log fails with EFBIG, as ENOSPC does on a full disk."""
    with limited(pid, resource.RLIMIT_FSIZE, 1):
        yield
