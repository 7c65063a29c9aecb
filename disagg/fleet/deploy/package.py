"""The disagg package as it is here, as files for a host."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_SUFFIXES: Final = frozenset({".py", ".sh", ".toml", ".txt", ".typed"})


def package_files(root: Path = ROOT) -> dict[str, bytes]:
    """`disagg/...` -> content, of every file of the package that programs read. Model weights are not among them."""
    weights = root / "demo" / "models"
    return {
        f"disagg/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.suffix in _SUFFIXES and path.is_file() and not path.is_relative_to(weights)
    }


def digest(files: Mapping[str, bytes]) -> str:
    """16 hexadecimal digits that name these very files."""
    total = hashlib.sha256()
    for name, content in sorted(files.items()):
        total.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()[:16]
