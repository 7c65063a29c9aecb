"""Which disagg this is: its version, a hash of its code, and on a deployed host its release."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Final

VERSION = "0.1.0"
RELEASE_VARIABLE: Final = "DISAGG_RELEASE"  # names the release that a deployed server runs

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
    total = hashlib.sha256()
    for path in source_files():
        total.update(f"{path.relative_to(ROOT).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:12]


def pending_release(root: Path = ROOT) -> tuple[str, float] | None:
    """On a deployed host: the release that was deployed since this server started, and when, in seconds since 1970.
    root: the package, in HOST/releases/RELEASE; beside these, the link `current` points at the deployed release."""
    if not (runs := os.environ.get(RELEASE_VARIABLE)):
        return None
    link = root.parents[2] / "current"
    try:
        release, since = link.readlink().name, link.lstat().st_mtime
    except OSError:  # there is no such link
        return None
    return None if release == runs else (release, since)
