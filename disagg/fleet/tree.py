"""Files as one compressed stream, for machines to unpack."""

from __future__ import annotations

import io
import secrets
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


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar.gz of `size` bytes, readable from its beginning. `last`: the empty file that ends it."""

    stream: IO[bytes]
    size: int
    last: str


@contextmanager
def packed(files: Mapping[str, bytes | Path]) -> Iterator[Archive]:
    """The files as an archive, in memory while it is small. FleetError for a path that leaves the folder, or a file
    that cannot be read here."""
    last = f".whole-{secrets.token_hex(8)}"
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spool:
        with tarfile.open(fileobj=spool, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as tar:
            for name, content in files.items():
                _add(tar, _relative(name), content)
            _add(tar, last, b"")
        size = spool.tell()
        spool.seek(0)
        yield Archive(spool, size, last)


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
        raise FleetError(f"cannot read {content}: {error.strerror or error}") from error


def _relative(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise FleetError(f"{name!r} is no path below a folder", "give a relative path without ..")
    return f"./{path}"
