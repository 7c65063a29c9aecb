"""The locked versions of a host's environment: one file per set of extras and platform, made by `scripts.lock`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from disagg.fleet.facts.host import HostFacts

FOLDER: Final = Path(__file__).parents[2] / "locks"
PLATFORMS: Final[Mapping[str, tuple[str, str]]] = {
    "linux-aarch64": ("Linux", "aarch64"),
    "linux-x86_64": ("Linux", "x86_64"),
    "macosx-arm64": ("Darwin", "arm64"),
}


@dataclass(frozen=True, slots=True)
class Locked:
    """One package. nbytes: of its wheel for the lock's platform, 0 if the file does not state it."""

    version: str
    nbytes: int = 0


def lock_name(extras: Sequence[str], facts: HostFacts) -> str:
    """The name of the lock for these extras on a host: `vllm-linux-aarch64`; "" for a platform without locks."""
    platform = next((name for name, kind in PLATFORMS.items() if kind == (facts.os, facts.arch)), "")
    return "-".join([*extras, platform]) if platform else ""


def committed_locks() -> dict[str, str]:
    """The locks of this installation by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.txt"))}


def locked_packages(text: str) -> dict[str, Locked]:
    """Canonical name -> version and size, from lines such as `torch==2.13.0  # 427210998`."""
    packages: dict[str, Locked] = {}
    for line in text.splitlines():
        pin, _, comment = line.partition("#")
        name, pinned, version = pin.partition("==")
        if pinned:
            nbytes = int(comment) if comment.strip().isdigit() else 0
            packages[canonicalize_name(name.strip())] = Locked(version.strip(), nbytes)
    return packages


def render(packages: Mapping[str, Locked], extras: Sequence[str], platform: str, python: str) -> str:
    """The text of a lock. `locked_packages` reads it."""
    head = (
        f"# disagg[{','.join(extras)}] on {platform}, resolved for Python {python}: version, and bytes of the wheel.\n"
        "# Made by: python -m scripts.lock\n"
    )
    return head + "".join(f"{name}=={one.version}  # {one.nbytes}\n" for name, one in sorted(packages.items()))
