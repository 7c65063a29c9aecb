"""What a host's Python environment has to hold: its engine's requirements there, at the versions of a lock, and the
wheels that meet them.

There is a lock per set of extras and platform, made by `scripts.lock`: a requirements file of pip and uv with lines
`NAME==VERSION --hash=sha256:... --hash=sha256:...  # BYTES`.
"""

from __future__ import annotations

import email.parser
import importlib.metadata
import re
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from disagg.config import Host
from disagg.errors import FleetError
from disagg.fleet.facts.host import HostFacts, Python

CONSTRAINTS: Final = Path(__file__).parents[1] / "constraints.txt"
_PARSING: Final = threading.Lock()
_OLDEST_GLIBC = 5  # 2.5, of manylinux1
LOCKS: Final = Path(__file__).parents[1] / "locks"
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
class PackageRequirements:
    """Requirements of disagg. declared: lines with their markers. locked: versions, one `name==version` a line. locks:
    by name, of the environments that have locked versions of their own."""

    declared: tuple[str, ...]
    locked: str
    locks: Mapping[str, str] = field(default_factory=dict)

    def lock(self, extras: Sequence[str], facts: HostFacts) -> tuple[str, Mapping[str, Pin]]:
        """Path below disagg/fleet and packages of the lock for these extras on a host."""
        name = lock_name(extras, facts)
        path, text = (f"locks/{name}.txt", self.locks[name]) if name in self.locks else (CONSTRAINTS.name, self.locked)
        return path, locked_packages(text)


def installed_requirements() -> PackageRequirements:
    """Requirements of this installation."""
    return PackageRequirements(declared(), CONSTRAINTS.read_text(encoding="utf-8"), committed_locks())


def extras(host: Host) -> tuple[str, ...]:
    """The extras of disagg that are installed for the host's engine."""
    extras = host.engine.kind.extras_for(host.roles)
    return (*extras, "quantize") if host.engine.quantization is not None else extras


def declared() -> tuple[str, ...]:
    """The requirements that the installed disagg declares, with their markers."""
    try:
        return tuple(importlib.metadata.requires("disagg") or ())
    except importlib.metadata.PackageNotFoundError as error:
        reason = "disagg is not installed here, so its requirements are unknown"
        raise FleetError(reason, "pip install -e . in a clone of it") from error


def parse_requirement(line: str) -> Requirement:
    """A requirement line. Threads parse one at a time: markers are read with `ast`, in which two threads of Python
    before 3.11.8 and 3.12.2 fail with "AST constructor recursion depth mismatch" (CPython issue 106905)."""
    with _PARSING:
        return Requirement(line)


def requirements(wanted: Sequence[str], lines: Iterable[str], target: dict[str, str]) -> tuple[str, ...]:
    """The lines that apply to `target` (a marker environment) with these extras, without their markers, sorted."""
    return tuple(sorted({str(one) for one in _applying(wanted, lines, target)}))


def _applying(wanted: Iterable[str], lines: Iterable[str], target: dict[str, str]) -> Iterator[Requirement]:
    for line in lines:
        requirement = parse_requirement(line)
        marker, requirement.marker = requirement.marker, None
        if marker is None or any(marker.evaluate({**target, "extra": extra}) for extra in ("", *wanted)):
            yield requirement


def marker_environment(facts: HostFacts, python: Python | None) -> dict[str, str]:
    """The values of requirement markers on the host."""
    version = python.version if python is not None else (3, 12, 0)
    return {
        "sys_platform": facts.sys_platform,
        "platform_system": facts.os,
        "platform_machine": facts.arch,
        "os_name": "posix",
        "python_version": f"{version[0]}.{version[1]}",
        "python_full_version": ".".join(map(str, version)),
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_version": "",
        "implementation_version": ".".join(map(str, version)),
    }


# Locks


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
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(LOCKS.glob("*.txt"))}


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


# Wheels


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel file, and the parts of its name."""

    path: Path
    name: str
    version: Version
    tags: frozenset[Tag]


def choose_wheels(
    folder: Path,
    requirements: Sequence[str],
    pins: Mapping[str, Pin],
    target: dict[str, str],
    tags: Sequence[Tag],
) -> tuple[list[Wheel], list[str]]:
    """The wheels that meet the requirements and their dependencies, and the requirements that have no wheel.

    target: the host's marker environment. tags: what the host accepts, best first.
    """
    usable = _usable(folder, tags)
    chosen: dict[str, Wheel] = {}
    missing: list[str] = []
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [parse_requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        wheel = _best(usable.get(name, []), requirement, pins.get(name))
        if wheel is None:
            missing.append(f"{name}=={pins[name].version}" if name in pins else str(requirement))
            continue
        chosen[name] = wheel
        stamp = wheel.path.stat()
        lines = _metadata(wheel.path, stamp.st_size, stamp.st_mtime_ns)
        waiting += _applying(requirement.extras, lines, target)
    return sorted(chosen.values(), key=lambda wheel: wheel.name), sorted(missing)


def host_tags(facts: HostFacts, python: Python) -> list[Tag]:
    """The wheel tags that the host's python accepts, best first."""
    version = python.version[:2]
    platforms = list(_platforms(facts))
    interpreter = f"cp{version[0]}{version[1]}"
    return [*cpython_tags(version, platforms=platforms), *compatible_tags(version, interpreter, platforms)]


def _platforms(facts: HostFacts) -> Iterator[str]:
    numbers = [int(part) for part in facts.os_version.split(".")[:2] if part.isdigit()]
    if facts.os == "Darwin":
        major, minor = (*numbers, 0, 0)[:2]
        yield from mac_platforms((major or 14, minor), facts.arch)
        return
    for minor in range(numbers[1] if len(numbers) == 2 else 17, _OLDEST_GLIBC - 1, -1):
        yield f"manylinux_2_{minor}_{facts.arch}"
        if legacy := {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}.get(minor):
            yield f"{legacy}_{facts.arch}"
    yield f"linux_{facts.arch}"


def _usable(folder: Path, tags: Sequence[Tag]) -> dict[str, list[Wheel]]:
    """Wheels in the folder by canonical name, of those that the host can use; best tag first."""
    if not folder.is_dir():
        raise FleetError(f"there is no folder of wheels {folder}", "correct `wheels` in [deploy] of hosts.toml")
    rank = {tag: place for place, tag in enumerate(tags)}
    by_name: dict[str, list[Wheel]] = {}
    for path in sorted(folder.glob("*.whl")):
        try:
            name, version, _, wheel_tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename as error:
            raise FleetError(f"{path}: {error}", "remove that file, or restore its name") from error
        if any(tag in rank for tag in wheel_tags):
            by_name.setdefault(name, []).append(Wheel(path, name, version, wheel_tags))
    for wheels in by_name.values():
        wheels.sort(key=lambda wheel: min(rank[tag] for tag in wheel.tags if tag in rank))
    return by_name


def _best(wheels: Sequence[Wheel], requirement: Requirement, pinned: Pin | None) -> Wheel | None:
    """The newest wheel that fits requirement and pin; among equal versions the one with the best tag."""
    fitting = [wheel for wheel in wheels if requirement.specifier.contains(wheel.version, prereleases=True)]
    if pinned is not None:
        fitting = [wheel for wheel in fitting if pinned.version in (wheel.version.public, str(wheel.version))]
    return max(fitting, key=lambda wheel: wheel.version, default=None)


@lru_cache(maxsize=1024)
def _metadata(path: Path, size: int, mtime_ns: int) -> tuple[str, ...]:
    """The Requires-Dist lines of a wheel file."""
    try:
        with zipfile.ZipFile(path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            message = email.parser.BytesParser().parsebytes(wheel.read(name), headersonly=True)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise FleetError(f"{path} is not a wheel", "download it again") from error
    return tuple(message.get_all("Requires-Dist") or ())
