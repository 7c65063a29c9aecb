"""Files that are written in one step: whoever reads one sees its old content or the new one, also after a power cut."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PRIVATE = 0o600


def replace_file(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Write a file, or replace it; if that fails, it is as it was. Through a link, so that the link stays one. Raises
    OSError, also for what is no regular file."""
    with drafted(path, content, mode) as (draft, target):
        draft.replace(target)


def stamp(path: Path) -> tuple[int, int, int] | None:
    """What another content of the file changes; None if it cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def create_file(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """The same, unless the file exists, also if it has been created meanwhile."""
    with drafted(path, content, mode) as (draft, target), suppress(FileExistsError):
        os.link(draft, target)


@contextmanager
def drafted(path: Path, content: bytes, mode: int = PRIVATE) -> Iterator[tuple[Path, Path]]:
    """The content in a file of its own beside the one that it is for, and that one: the block moves it there. A draft
    that is left at its end is removed."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    draft = target.with_name(f".disagg.{secrets.token_hex(8)}.new")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield draft, target
    finally:
        with suppress(OSError):  # it was moved
            draft.unlink()
