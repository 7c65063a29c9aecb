"""The pinned files of a host's environment: one lock per set of extras and platform, made by `scripts.lock`.

A lock is a requirements file of pip and uv: `NAME==VERSION --hash=sha256:... --hash=sha256:...  # BYTES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from disagg.fleet.facts.host import HostFacts

FOLDER: Final = Path(__file__).parents[1] / "locks"
PLATFORMS: Final[Mapping[str, tuple[str, str]]] = {
    "linux-aarch64": ("Linux", "aarch64"),
    "linux-x86_64": ("Linux", "x86_64"),
    "macosx-arm64": ("Darwin", "arm64"),
}
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
"""The versions of Python that locks have wheels for; vLLM's locks, for one of them."""
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_PYTHON: Final = re.compile(r'python_version == "([0-9.]+)"')


@dataclass(frozen=True, slots=True)
class Pin:
    """One package. nbytes: of its wheel for the lock's platform, 0 if the file does not state it. hashes: SHA-256, in
    hexadecimal, of its wheels for that platform; none in constraints.txt. pythons: the versions that need it; empty:
    all."""

    version: str
    nbytes: int = 0
    hashes: tuple[str, ...] = ()
    pythons: tuple[str, ...] = ()

    def line(self, name: str) -> str:
        """The line of a requirements file that accepts these files alone."""
        marker = " or ".join(f'python_version == "{python}"' for python in self.pythons)
        words = [f"{name}=={self.version}", *([f"; {marker}"] if marker else [])]
        return " ".join([*words, *(f"--hash=sha256:{digest}" for digest in self.hashes)])


def lock_name(extras: Sequence[str], facts: HostFacts) -> str:
    """The name of the lock for these extras on a host: `vllm-linux-aarch64`; "" for a platform without locks."""
    platform = next((name for name, kind in PLATFORMS.items() if kind == (facts.os, facts.arch)), "")
    return "-".join([*extras, platform]) if platform else ""


def committed_locks() -> dict[str, str]:
    """The locks of this installation by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.txt"))}


@lru_cache(maxsize=32)
def locked_packages(text: str) -> Mapping[str, Pin]:
    """Canonical name -> package, from the lines of a lock or of constraints.txt."""
    packages: dict[str, Pin] = {}
    for line in text.splitlines():
        pin, _, comment = line.partition("#")
        name, pinned, rest = pin.partition("==")
        if pinned:
            version = re.split(r"[\s;]", rest.strip(), maxsplit=1)[0]
            nbytes = int(comment) if comment.strip().isdigit() else 0
            hashes, pythons = tuple(_HASH.findall(rest)), tuple(_PYTHON.findall(rest))
            packages[canonicalize_name(name.strip())] = Pin(version, nbytes, hashes, pythons)
    return packages


def pin_lines(packages: Mapping[str, Pin]) -> str:
    """The versions alone, as a file of constraints."""
    return "".join(f"{name}=={one.version}\n" for name, one in packages.items())


def hash_lines(packages: Mapping[str, Pin]) -> str:
    """A requirements file of these packages that accepts no other files of them."""
    return "".join(f"{one.line(name)}\n" for name, one in packages.items())


def render(packages: Mapping[str, Pin], extras: Iterable[str], platform: str, pythons: Sequence[str] = PYTHONS) -> str:
    """The text of a lock. `locked_packages` reads it."""
    head = (
        f"# disagg[{','.join(extras)}] on {platform}, Python {', '.join(pythons)}: version, the index's hashes of"
        " the wheels, bytes of one.\n# Made by: python -m scripts.lock\n"
    )
    return head + "".join(f"{one.line(name)}  # {one.nbytes}\n" for name, one in sorted(packages.items()))
