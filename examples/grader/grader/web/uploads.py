"""Uploaded files as notebooks, within bounds."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Final

from grader.errors import NotebookError
from grader.notebook import MAX_BYTES

MAX_UPLOAD: Final = 64 << 20
MAX_NOTEBOOKS: Final = 200
METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Those that zipfile decompresses within bounds. Of bzip2 and LZMA it keeps all that a piece becomes: gigabytes."""
UNREADABLE: Final = (
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
    EOFError,
    OSError,
    ValueError,
    struct.error,
    zlib.error,
)
"""What zipfile raises for a file that is damaged, encrypted or made to confuse it."""


def notebooks(files: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Name and content of each notebook, also of those in zip files. Raises NotebookError."""
    found: dict[str, bytes] = {}
    for name, data in (one for file in files for one in _members(*file)):
        if name in found:
            raise NotebookError(f"two notebooks are called {name}")
        if len(found) == MAX_NOTEBOOKS:
            raise NotebookError(f"more than {MAX_NOTEBOOKS} notebooks")
        found[name] = data
    if not found:
        raise NotebookError("no notebook: choose .ipynb files, or a zip file that contains some")
    return list(found.items())


def _members(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    base = PurePosixPath(name.replace("\\", "/")).name[:200]
    if base.lower().endswith(".ipynb"):
        yield base, data
    elif base.lower().endswith(".zip"):
        yield from _unzipped(base, data)


def _unzipped(base: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    room = MAX_UPLOAD
    try:
        with zipfile.ZipFile(_Pieces(data)) as archive:
            for member in archive.infolist():
                path = PurePosixPath(member.filename)
                if path.suffix.lower() != ".ipynb" or path.name.startswith(".") or "__MACOSX" in path.parts:
                    continue
                if member.compress_type not in METHODS:
                    raise NotebookError(f"{base}: {path.name[:200]} is compressed by another method than deflate")
                with archive.open(member) as file:
                    content = file.read(MAX_BYTES + 1)  # never trust the size that the archive states
                room -= len(content)
                if room < 0:
                    raise NotebookError(f"{base} has more than {MAX_UPLOAD >> 20} MiB of notebooks")
                yield "_".join(path.parts)[-200:], content
    except UNREADABLE as error:
        raise NotebookError(f"{base} is no zip file that can be read: {error}") from error


class _Pieces(io.BytesIO):
    """A file of which no read takes more than a notebook may have. zipfile reads the list of members in one: that of
    a million members is refused before each of them takes memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = self.getbuffer().nbytes - self.tell()
        if (left if size is None or size < 0 else min(size, left)) > MAX_BYTES + 1:
            raise zipfile.BadZipFile("it has too many members")
        return super().read(size)
