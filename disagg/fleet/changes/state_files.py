"""Files on this machine that only this user can read: written in one step, and locked by one command at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from disagg.errors import FleetError, HostLocked
from disagg.files import create_file, replace_file
from disagg.fleet.changes.audit import Caller


def write_private(path: Path, text: str, once: bool = False) -> None:
    """Write a file that only this user can read. once: keep it if another command has created it meanwhile."""
    with reported(path):
        (create_file if once else replace_file)(path, text.encode())


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a FleetError about this path."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free space on that disk" if full else "check that folder and its owner"
        message = f"cannot use {path}: {error.strerror or error}"
        raise FleetError(message, f"{hint}, or set XDG_STATE_HOME to another folder") from error


@contextmanager
def locked_file(path: Path, why: str) -> Iterator[None]:
    """Hold the lock of this file, so that two commands do not interleave. HostLocked names the command that has it.
    why: this command."""
    with reported(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _acquire(descriptor)
        with suppress(OSError):  # the note is only for error messages: on a full disk, stopping must still work
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(Caller.this_process(why)).encode(), 0)
        yield
    finally:
        # Not by closing alone: a child that another thread has just forked has the descriptor, too.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _acquire(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 400, 0).decode("utf-8", "replace") or "another disagg command holds it"
        raise HostLocked(
            f"the fleet is locked on this machine: {holder}", "nothing was changed; wait until that command has ended"
        ) from None
