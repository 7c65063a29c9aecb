"""What models take of this machine's memory: what there is for them, what each needs, and which one has how much.

Claims are files in one folder of the user, one for each model that is loaded. A file counts as long as the process that
wrote it has it locked, so that one whose process was killed counts no more. Decisions are made with the folder's own
lock, so that two hosts never take the same room.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from disagg import logs, nvidia
from disagg.api.base import InvalidValue
from disagg.api.keeper import MemoryClaim
from disagg.config import Host, Model
from disagg.config.memory import SYSTEM_BYTES, loading_of
from disagg.planning.memory import need
from disagg.planning.sizing import SHAPE, stored

_BYTES: Final = 2048
"""Of each file, padded: what is read while it is written is the old text or the new one."""
_LOCK: Final = "lock"
_MAX_FILES: Final = 4096
MAX_NEED: Final = 1 << 50
"""What no machine has: of a model whose config.json states more."""


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """Memory that models may take on a machine. pool: "" for that of the system, else the card."""

    nbytes: int
    pool: str = ""
    device: str = "cpu"


def source_of(host: Host, model: Model) -> str:
    """The hub id or folder of a model on this host; "" if its engine loads no files."""
    source = model.sources.get(host.engine.name, "")
    return "" if source.startswith(SHAPE) or not host.engine.kind.loads else source


def machine_room(host: Host) -> MachineRoom:
    """What is taken as the room of the host's machine. Takes up to 10 s where there is an NVIDIA driver."""
    named, devices = host.engine.device, host.engine.kind.devices
    cards = _cards() if "cuda" in devices and named != "cpu" else ()
    device = "gpu" if named == "mps" else named.partition(":")[0]
    if named == "auto":
        device = "gpu" if platform.system() == "Darwin" else "cuda" if cards else "cpu"
    card = next((one for one in cards if one.memory), None)
    if device == "cuda" and card is not None and card.memory is not None:
        return MachineRoom(card.memory, card.name, device)
    return MachineRoom(max(0, psutil.virtual_memory().total - SYSTEM_BYTES), "", device)


def needed(host: Host, model: Model, room: MachineRoom, folder: Path | None = None, nbytes: int = 0) -> int:
    """Bytes of memory that the model takes once it is loaded, at most MAX_NEED. folder, nbytes: of its files, if they
    are known."""
    loading = loading_of(host, model, room.device, own=bool(room.pool))
    known = stored(str(folder) if folder is not None else source_of(host, model))
    total = nbytes + loading.kv_bytes if known is None else need(known, loading).total
    return min(max(0, total), MAX_NEED)


def _cards() -> tuple[nvidia.GPU, ...]:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ("nvidia-smi", *nvidia.ARGUMENTS), capture_output=True, text=True, timeout=10, check=False
        )
        return nvidia.parse(done.stdout)
    return ()


class Ledger:
    """The claims on one machine's memory. A folder that cannot be used is logged; then nobody's claims are known."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: set[str] = set()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            _unusable(folder, error)

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Decide in this block. False: another process has the lock; look again in a moment."""
        try:
            lock = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            _unusable(self._folder, error)
            yield True
            return
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)

    def claim(self, claim: MemoryClaim) -> Claimed:
        """Write a claim, which counts until it is released or this process ends."""
        name = f"{os.getpid()}-{secrets.token_hex(4)}.json"
        self._own.add(name)
        return Claimed(self._folder / name, claim)

    def others(self) -> list[MemoryClaim]:
        """What other objects and processes claim. Files whose process has ended are removed."""
        found = []
        try:
            names = sorted(path.name for path in self._folder.glob("*.json"))
        except OSError:
            return []
        self._own.intersection_update(names)
        for name in names[:_MAX_FILES]:
            if name not in self._own and (claim := _read(self._folder / name)) is not None:
                found.append(claim)
        return found


class Claimed:
    """A claim that was written. `claim` is its present value."""

    def __init__(self, path: Path, claim: MemoryClaim) -> None:
        self.claim = claim
        self._path = path
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)  # a reader has it for a moment
            self._write()
        except OSError as error:
            _unusable(path, error)

    def update(self, claim: MemoryClaim) -> None:
        if claim != self.claim:
            self.claim = claim
            self._write()

    def release(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._file = None

    def _write(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # a full disk: the file has its block already
                os.pwrite(self._file, self.claim.to_bytes().ljust(_BYTES), 0)


def _read(path: Path) -> MemoryClaim | None:
    """The claim; None if its process has ended, or has not written it yet."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        with suppress(OSError, InvalidValue):
            return MemoryClaim.from_bytes(os.pread(file, _BYTES, 0))
        return None
    else:
        if os.fstat(file).st_size:  # else it is being made
            with suppress(OSError):
                path.unlink()
        return None
    finally:
        os.close(file)


def _unusable(path: Path, error: OSError) -> None:
    logs.event(logging.WARNING, "memory_not_recorded", path=str(path), reason=error.strerror or str(error))
