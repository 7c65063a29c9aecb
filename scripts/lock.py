"""Make the locks of the hosts' environments: disagg/fleet/locks/NAME-PLATFORM.txt.

    python -m scripts.lock [NAME]...      all of them, or those of these names

Needs uv on PATH, and the package index that uv is configured with. Reads metadata only: the hashes are those that the
index states. Asks for the size of each wheel. Run it after a change of the dependencies in pyproject.toml or of
constraints.txt. A lock that constraints.txt does not pin keeps its versions: remove its file to take the newest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import httpx
from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_wheel_filename

from disagg.fleet.deploy.requirements import (
    LOCKS,
    PLATFORMS,
    PYTHONS,
    Pin,
    host_tags,
    locked_packages,
    pin_lines,
    render,
)
from disagg.fleet.facts.host import HostFacts, Python

ROOT: Final = Path(__file__).parents[1]
CONSTRAINTS: Final = ROOT / "disagg/fleet/constraints.txt"
PYTHON: Final = "3.12"
"""Whose wheels are measured."""
_UV_PLATFORMS: Final[Mapping[str, str]] = {
    "linux-aarch64": "aarch64-manylinux_2_35",
    "linux-x86_64": "x86_64-manylinux_2_35",
    "macosx-arm64": "aarch64-apple-darwin",
}
"""Ubuntu 22.04 and later; macOS 14 and later."""
_NEWEST_SYSTEM: Final = {"Linux": "2.60", "Darwin": "30.0"}
"""glibc and macOS: an installer prefers the wheel for the newest that the host has."""
_RESOLVE_S: Final = 600.0
_HEAD_S: Final = 30.0


@dataclass(frozen=True)
class Kind:
    """One environment. extras: of pyproject.toml. free: the packages that constraints.txt does not pin here; None: its
    own lock pins them. platforms: where it runs. pythons: for which there are wheels of all its packages."""

    extras: tuple[str, ...]
    free: frozenset[str] | None = frozenset()
    platforms: tuple[str, ...] = ("linux-aarch64", "linux-x86_64")
    pythons: tuple[str, ...] = PYTHONS


KINDS: Final[Mapping[str, Kind]] = {
    "prefill": Kind(("prefill",)),
    # transformers and its kernels belong together, and the newest pair need not be the pinned one.
    "prefill-quantize": Kind(("prefill", "quantize"), frozenset({"transformers"})),
    "vllm": Kind(("vllm",), None, pythons=(PYTHON,)),
    "decode": Kind(("decode",), platforms=tuple(PLATFORMS)),
    "gateway": Kind(("gateway",), platforms=tuple(PLATFORMS)),
}


@dataclass
class Resolved:
    """A package. address: of the wheel for PYTHON, or the first that needs it. hashes: of the wheels by file name."""

    version: str
    address: str
    pythons: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)


def main(names: Sequence[str]) -> None:
    LOCKS.mkdir(exist_ok=True)
    for name, kind in KINDS.items():
        if names and name not in names:
            continue
        for platform in kind.platforms:
            target = LOCKS / f"{name}-{platform}.txt"
            known = locked_packages(target.read_text(encoding="utf-8")) if target.exists() else {}
            packages = dict(_sized(_resolved(kind, platform, known), known, kind))
            target.write_text(render(packages, kind.extras, platform, kind.pythons), encoding="utf-8")
            total = sum(package.nbytes for package in packages.values())
            hashes = sum(len(package.hashes) for package in packages.values())
            print(f"{target.name}: {len(packages)} packages, {total / 1e9:.2f} GB, {hashes} hashes")


def _resolved(kind: Kind, platform: str, known: Mapping[str, Pin]) -> dict[str, Resolved]:
    """The packages of every Python, at the versions that the oldest one can have."""
    found: dict[str, Resolved] = {}
    tags = _tags(platform)
    pinned = [pin_lines(known)] if kind.free is None else [*_constraints(kind.free)]
    for python in kind.pythons:
        earlier = [f"{name}=={one.version}\n" for name, one in found.items()]
        for package in _compiled(kind, platform, python, [*pinned, *earlier]):
            name, address = canonicalize_name(package["name"]), package["wheels"][0]["url"]
            one = found.setdefault(name, Resolved(package["version"], address))
            if python == PYTHON:
                one.address = address
            one.pythons.append(python)
            one.hashes |= dict(_hashes(package["wheels"], tags))
    return found


def _compiled(kind: Kind, platform: str, python: str, constraints: Sequence[str]) -> list[dict[str, Any]]:
    """The packages with their wheels, as uv resolves the extras for a platform and a Python."""
    with tempfile.TemporaryDirectory() as folder:
        limits, lock = Path(folder) / "constraints.txt", Path(folder) / "pylock.lock.toml"
        limits.write_text("".join(constraints), encoding="utf-8")
        argv = ["uv", "pip", "compile", "--quiet", "--only-binary", ":all:", "--format", "pylock.toml"]
        argv += ["--python-version", python, "--python-platform", _UV_PLATFORMS[platform]]
        argv += ["--constraints", str(limits), "--output-file", str(lock)]
        argv += [word for extra in kind.extras for word in ("--extra", extra)]
        environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
        subprocess.run([*argv, str(ROOT / "pyproject.toml")], check=True, timeout=_RESOLVE_S, env=environment)
        packages: list[dict[str, Any]] = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    return [one for one in packages if "wheels" in one]


def _constraints(free: frozenset[str]) -> Iterator[str]:
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines(keepends=True):
        if canonicalize_name(re.split("==", line)[0].strip()) not in free:
            yield line


def _tags(platform: str) -> frozenset[Tag]:
    """The wheels that a host of the platform may install, with any of PYTHONS."""
    os_name, arch = PLATFORMS[platform]
    facts = HostFacts("", os_name, arch, os_version=_NEWEST_SYSTEM[os_name])
    pythons = (Python("", (3, int(version.partition(".")[2]), 0)) for version in PYTHONS)
    return frozenset(tag for python in pythons for tag in host_tags(facts, python))


def _hashes(wheels: Sequence[Mapping[str, Any]], tags: frozenset[Tag]) -> Iterator[tuple[str, str]]:
    """File name and hash of the wheels with one of these tags."""
    for wheel in wheels:
        name = unquote(urlsplit(wheel["url"]).path.rpartition("/")[2])
        if not tags.isdisjoint(parse_wheel_filename(name)[3]):
            yield name, wheel["hashes"]["sha256"]


def _sized(resolved: Mapping[str, Resolved], known: Mapping[str, Pin], kind: Kind) -> Iterator[tuple[str, Pin]]:
    """The packages with the size of their wheels; only those that the lock did not have are asked for."""
    with httpx.Client(timeout=_HEAD_S, follow_redirects=True) as client, ThreadPoolExecutor(8) as pool:

        def size(name: str) -> int:
            if (before := known.get(name)) is not None and before.version == resolved[name].version:
                return before.nbytes
            return int(client.head(resolved[name].address).raise_for_status().headers["Content-Length"])

        for name, nbytes in zip(sorted(resolved), pool.map(size, sorted(resolved)), strict=True):
            one = resolved[name]
            pythons = () if len(one.pythons) == len(kind.pythons) else tuple(one.pythons)
            yield name, Pin(one.version, nbytes, tuple(sorted(one.hashes.values())), pythons)


if __name__ == "__main__":
    main(sys.argv[1:])
