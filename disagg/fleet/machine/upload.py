"""Files to a machine: small ones as one archive, large ones by parts, and how far an upload has come."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from disagg.errors import FleetError

RESUMED_FROM: Final = 4 << 20
"""Bytes. Smaller files are sent again as a whole, in one archive."""
_IN_MEMORY = 64 << 20
_COMPRESSED_UP_TO = 16 << 20
"""Bytes. Larger archives hold wheels, which do not compress, and gzip is slower than SSH."""


OnMoved = Callable[[int, int, int], None]
"""Called with the bytes of an upload that are on their way or there, the bytes of all of it, and those that this upload
has sent: the others were there already."""


def split(files: Mapping[str, bytes | Path]) -> tuple[dict[str, bytes | Path], list[LargeFile]]:
    """The small files, and the large ones."""
    small: dict[str, bytes | Path] = {}
    large: list[LargeFile] = []
    for name, content in files.items():
        found = LargeFile.of(name, content) if isinstance(content, Path) else None
        if found is not None and found.size >= RESUMED_FROM:
            large.append(found)
        else:
            small[name] = content
    return small, large


@dataclass(frozen=True, slots=True)
class LargeFile:
    """One file that is sent by itself. name: below the folder. part: its name among the parts on the machine."""

    name: str
    path: Path
    size: int
    mode: str
    part: str

    @staticmethod
    def of(name: str, path: Path) -> LargeFile:
        """FleetError if it cannot be read."""
        with _readable(path):
            found = path.stat()
        key = f"{name}\0{found.st_size}\0{found.st_mtime_ns}"
        part = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return LargeFile(name, path, found.st_size, "755" if found.st_mode & 0o100 else "644", part)

    def digest(self) -> str:
        """The SHA-256 of its content."""
        with _readable(self.path), self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextmanager
    def after(self, offset: int) -> Iterator[IO[bytes]]:
        """Its content from an offset on. FleetError if it cannot be read, also while it is in use."""
        with _readable(self.path), self.path.open("rb") as file:
            file.seek(offset)
            yield file


def arrived(output: str, large: Sequence[LargeFile]) -> dict[str, int]:
    """How many bytes of each part a machine has, from the lines `PART BYTES`. One that is too long counts as none."""
    sizes = {
        part: int(size) for part, _, size in (line.partition(" ") for line in output.splitlines()) if size.isdigit()
    }
    return {file.part: size if (size := sizes.get(file.part, 0)) <= file.size else 0 for file in large}


class Payload:
    """A command's input that notes when it was read last: the machine has taken what was read before.

    error: why it could not be read to its end. The thread that sends it must go on to end the command's input."""

    def __init__(self, stream: IO[bytes], on_read: Callable[[int], None] = lambda count: None) -> None:
        """on_read: called with the number of bytes of each piece, on the thread that sends it."""
        self.at = time.monotonic()
        self.error: Exception | None = None
        self._stream = stream
        self._on_read = on_read

    def read(self, count: int) -> bytes:
        """The next piece, empty at the end and after an error."""
        self.at = time.monotonic()
        try:
            piece = self._stream.read(count)
            self._on_read(len(piece))
        except Exception as error:  # noqa: BLE001 - raised on the thread that waits for the command
            self.error = error
            return b""
        return piece


class MovedBytes:
    """Counts the bytes of one upload that are on the machine: sent, or there before. report: gets that count, the
    total, and how many of them were sent."""

    def __init__(self, total: int, report: OnMoved) -> None:
        self._total, self._report = total, report
        self._count = self._found = 0

    def add(self, count: int) -> None:
        """More bytes were taken."""
        self._count += count
        if count:
            self._report(min(self._count, self._total), self._total, self._count - self._found)

    def found(self, count: int) -> None:
        """So many bytes were there already."""
        self._found += count
        self.add(count)


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar.gz of `size` bytes, positioned at its start."""

    stream: IO[bytes]
    size: int


@contextmanager
def packed(files: Mapping[str, bytes | Path]) -> Iterator[Archive]:
    """The files as an archive, in memory up to 64 MiB. Raises FleetError for a path that leads out of the folder, or a
    file that cannot be read."""
    level = 1 if sum(map(size_of, files.values())) <= _COMPRESSED_UP_TO else 0
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
    with _readable(content), content.open("rb") as file:
        status = content.stat()
        entry.size, entry.mtime = status.st_size, int(status.st_mtime)
        entry.mode = 0o755 if status.st_mode & 0o100 else 0o644
        tar.addfile(entry, file)


def size_of(content: bytes | Path) -> int:
    """Bytes of a file or of its content."""
    if isinstance(content, bytes):
        return len(content)
    with _readable(content):
        return content.stat().st_size


def _relative(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise FleetError(f"{name!r} is not a relative path within a folder", "give a relative path without ..")
    return f"./{path}"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FleetError(f"cannot read {path}: {error.strerror or error}", f"ls -l {path}") from error
