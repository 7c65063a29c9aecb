"""Writes a file that only this user can read."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path


def replace_private(path: Path, data: bytes) -> None:
    """Write a file, or replace it in one step: if that fails, it is as it was. Raises OSError, also for what is no
    regular file."""
    target = Path(os.path.realpath(path))  # through a link, so that the link stays one
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    draft = target.with_name(f".disagg.{os.getpid()}.new")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        with suppress(OSError):  # after `replace` it no longer exists
            draft.unlink()
