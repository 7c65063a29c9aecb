"""Files to a machine: small ones as one archive, large ones by parts, and how far an upload has come."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from disagg.errors import FleetError
from disagg.fleet.machine.machine import Machine, Payload, script
from disagg.units import estimate

RESUMED_FROM: Final = 4 << 20
"""Bytes. Smaller files are sent again as a whole, in one archive."""
_IN_MEMORY = 64 << 20
_COMPRESSED_UP_TO = 16 << 20
"""Bytes. Larger archives hold wheels, which do not compress, and gzip is slower than SSH."""
_SMALL_S = 30.0
"""How long looking which parts are there may take."""
_STALLED_S = 60.0
"""How long the next piece of a large file may take."""
EVERY_S = 1.0
"""The time between two lines about an upload."""
OVER_S = 15.0
"""The rate is that of the last so many seconds."""

OnMoved = Callable[[int, int, int], None]
"""Called with the bytes of an upload that are on their way or there, the bytes of all of it, and those that this upload
has sent: the others were there already."""


def put_tree(
    machine: Machine,
    files: Mapping[str, bytes | Path],
    target: str,
    *,
    parts: str = "",
    timeout: float = 600.0,
    on_moved: OnMoved = lambda moved, total, sent: None,
) -> int:
    """Write files (relative POSIX path -> content) into the folder `target`. Returns the bytes sent.

    parts: a folder beside it, in which large files are gathered: an upload that broke off goes on where it stopped.
    Whoever names it removes it. timeout: seconds from the last bytes that the machine has taken.

    Atomic: the folder is filled under another name and renamed, replacing an existing one. Modes are 0644, or 0755
    for an executable Path; parents are created. Raises CommandFailed with the machine's error: disk full,
    read-only, not permitted.
    """
    small, large = split(files) if parts else (dict(files), [])
    with packed(small) as archive:
        moved = MovedBytes(archive.size + sum(file.size for file in large), on_moved)
        sent = _send_parts(machine, parts, large, moved) if large else 0
        words = [word for file in large for word in (file.part, file.digest(), file.mode, file.name)]
        argv = (target, parts, *words) if large else (target,)
        scripts, payload = ("path.sh", "beside.sh", "put_tree.sh"), Payload(archive.stream, moved.add)
        what = f"cannot put {len(files)} files into {target}"
        machine.send(("put_tree", target), argv, scripts, payload, timeout=timeout, what=what)
        return archive.size + sent


def _send_parts(machine: Machine, parts: str, large: Sequence[LargeFile], moved: MovedBytes) -> int:
    """Send what the machine does not have of these files; returns the bytes sent."""
    argv, look = [parts, *(file.part for file in large)], script("path.sh", "parts.sh")
    found = machine.run(argv, script=look, timeout=_SMALL_S)
    machine.require(found, f"cannot use {parts}")
    there, sent = arrived(found.stdout, large), 0
    for file in large:
        offset = there[file.part]
        moved.found(offset)
        if offset == file.size:
            continue
        with file.after(offset) as rest:
            argv, payload = [f"{parts}/{file.part}", str(offset)], Payload(rest, moved.add)
            what = f"cannot send {file.name}"
            machine.send(
                ("put_tree", file.name), argv, ("path.sh", "append.sh"), payload, timeout=_STALLED_S, what=what
            )
        sent += file.size - offset
    return sent


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


class UploadPace:
    """Makes lines of the progress of one upload. clock: in seconds."""

    def __init__(self, on_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_line, self._clock = on_line, clock
        self._seen: deque[tuple[float, int]] = deque()

    def moved(self, moved: int, total: int, sent: int) -> None:
        """An OnMoved: so many of all bytes are there."""
        now = self._clock()
        if not self._seen:
            self._seen.append((now, sent))
        if now - self._seen[-1][0] < EVERY_S:
            return
        while len(self._seen) > 1 and now - self._seen[0][0] > OVER_S:
            self._seen.popleft()
        began, before = self._seen[0]
        self._seen.append((now, sent))
        self._on_line(line(moved, total, (sent - before) / (now - began)))


def line(moved: int, total: int, rate: float) -> str:
    """`12 of 242 MB, 1.1 MB/s, 3 min left`. rate: bytes per second."""
    done = f"{moved / 1e6:.0f} of {total / 1e6:.0f} MB"
    if rate <= 0:
        return done
    return f"{done}, {rate / 1e6:.1f} MB/s, {estimate((total - moved) / rate)} left"
