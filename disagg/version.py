"""Which disagg this is: its version, a hash of its code, and on a deployed host its release."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

VERSION = "0.1.0"
OLDEST_PYTHON: Final = (3, 11)  # as `requires-python` in pyproject.toml
RELEASE_VARIABLE: Final = "DISAGG_RELEASE"  # names the release that a deployed server runs
DIGESTS: Final = "digests"
"""The file of a release that has the hashes of its code and of its host's settings, in one line."""

ROOT: Final = Path(__file__).parent
_SUFFIXES: Final = frozenset({".py", ".sh", ".toml", ".txt", ".typed", ".html", ".css", ".js", ".svg"})


def source_files(root: Path = ROOT) -> list[Path]:
    """Every file of the package that programs read, in order, without model weights."""
    weights = root / "demo" / "models"
    return [
        path
        for path in sorted(root.rglob("*"))
        if path.suffix in _SUFFIXES and path.is_file() and not path.is_relative_to(weights)
    ]


@lru_cache(maxsize=1)
def code_hash() -> str:
    """12 hexadecimal digits: a hash of the code of this installation, computed once per process."""
    return hash_of_code((path.relative_to(ROOT).as_posix(), path.read_bytes()) for path in source_files())


def hash_of_code(files: Iterable[tuple[str, bytes]]) -> str:
    """The same of these files, in the order of `source_files`: paths below the package, and contents."""
    total = hashlib.sha256()
    for name, content in files:
        total.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()[:12]


class DeployedRelease(NamedTuple):
    """since: when it was deployed, in seconds since 1970. code, config: by its DIGESTS, "" without that file."""

    release: str
    since: float
    code: str = ""
    config: str = ""


def pending_release(root: Path = ROOT) -> DeployedRelease | None:
    """The release that was deployed since this server started, on a deployed host. root: the package, in
    HOST/releases/RELEASE; beside these, the link `current` points at the deployed release."""
    if not (runs := os.environ.get(RELEASE_VARIABLE)):
        return None
    link = root.parents[2] / "current"
    try:
        release, since = link.readlink().name, link.lstat().st_mtime
    except OSError:  # there is no such link
        return None
    return None if release == runs else DeployedRelease(release, since, *_digests(link / DIGESTS))


def _digests(path: Path) -> tuple[str, str]:
    try:
        code, config = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):  # of a release without them
        return "", ""
    return code, config
