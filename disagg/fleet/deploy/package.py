"""The disagg package as it is here, as files for a host."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from disagg.version import ROOT, source_files


def package_files(root: Path = ROOT) -> dict[str, bytes]:
    """`disagg/...` -> content, of every file of the package that programs read."""
    return {f"disagg/{path.relative_to(root).as_posix()}": path.read_bytes() for path in source_files(root)}


def digest(files: Mapping[str, bytes]) -> str:
    """16 hexadecimal digits that name these very files: the SHA-256 over the sorted lines that `sha256sum` prints about
    them, so that a host can tell with its own tools whether a release still is what its name says (probe.sh)."""
    lines = sorted(f"{hashlib.sha256(content).hexdigest()}  ./{name}\n" for name, content in files.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
