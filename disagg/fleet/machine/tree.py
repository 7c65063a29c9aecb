"""Files as one tar.gz stream, which a machine unpacks."""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from disagg.errors import FleetError

_IN_MEMORY = 64 << 20
_COMPRESSED_UP_TO = 16 << 20
"""Bytes. Larger archives hold wheels, which do not compress, and gzip is slower than SSH."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar.gz of `size` bytes, positioned at its start."""

    stream: IO[bytes]
    size: int


@contextmanager
def packed(files: Mapping[str, bytes | Path]) -> Iterator[Archive]:
    """The files as an archive, in memory up to 64 MiB. Raises FleetError for a path that leads out of the folder, or a
    file that cannot be read."""
    level = 1 if sum(map(_size, files.values())) <= _COMPRESSED_UP_TO else 0
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spool:
        with tarfile.open(fileobj=spool, mode="w:gz", compresslevel=level, format=tarfile.PAX_FORMAT) as tar:
            for name, content in files.items():
                _add(tar, _relative(name), content)
        size = spool.tell()
        spool.seek(0)
        yield Archive(spool, size)


def _add(tar: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    entry = tarfile.TarInfo(name)
    if isinstance(content, bytes):
        entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o644
        tar.addfile(entry, io.BytesIO(content))
        return
    try:
        with content.open("rb") as file:
            status = content.stat()
            entry.size, entry.mtime = status.st_size, int(status.st_mtime)
            entry.mode = 0o755 if status.st_mode & 0o100 else 0o644
            tar.addfile(entry, file)
    except OSError as error:
        raise _unreadable(content, error) from error


def _size(content: bytes | Path) -> int:
    try:
        return len(content) if isinstance(content, bytes) else content.stat().st_size
    except OSError as error:
        raise _unreadable(content, error) from error


def _unreadable(path: object, error: OSError) -> FleetError:
    return FleetError(f"cannot read {path}: {error.strerror or error}", f"ls -l {path}")


def _relative(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise FleetError(f"{name!r} is not a relative path within a folder", "give a relative path without ..")
    return f"./{path}"
