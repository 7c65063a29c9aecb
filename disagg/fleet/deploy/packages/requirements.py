"""The packages of a host's Python environment: requirements of its engine, for its platform, at locked versions."""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from disagg.config import Host
from disagg.errors import FleetError
from disagg.fleet.deploy.packages.locks import committed_locks, lock_name, locked_packages
from disagg.fleet.facts.host import HostFacts, Python

CONSTRAINTS: Final = Path(__file__).parents[2] / "constraints.txt"
_PARSING: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class PackageRequirements:
    """Requirements of disagg. declared: lines with their markers. locked: versions, one `name==version` a line. locks:
    by name, of the environments that have locked versions of their own."""

    declared: tuple[str, ...]
    locked: str
    locks: Mapping[str, str] = field(default_factory=dict)

    def lock(self, extras: Sequence[str], facts: HostFacts) -> tuple[str, str]:
        """Path below disagg/fleet and text of the lock for these extras on a host."""
        name = lock_name(extras, facts)
        return (f"locks/{name}.txt", self.locks[name]) if name in self.locks else (CONSTRAINTS.name, self.locked)


def installed_requirements() -> PackageRequirements:
    """Requirements of this installation."""
    return PackageRequirements(declared(), locked(), committed_locks())


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


def locked() -> str:
    """The locked versions, one `name==version` a line."""
    return CONSTRAINTS.read_text(encoding="utf-8")


def parse_requirement(line: str) -> Requirement:
    """A requirement line. Threads parse one at a time: markers are read with `ast`, in which two threads of Python
    before 3.11.8 and 3.12.2 fail with "AST constructor recursion depth mismatch" (CPython issue 106905)."""
    with _PARSING:
        return Requirement(line)


def requirements(wanted: Sequence[str], lines: Iterable[str], target: dict[str, str]) -> tuple[str, ...]:
    """The lines that apply to `target` (a marker environment) with these extras, without their markers, sorted."""
    return tuple(sorted(set(_chosen(wanted, lines, target))))


def _chosen(wanted: Sequence[str], lines: Iterable[str], target: dict[str, str]) -> Iterator[str]:
    for line in lines:
        requirement = parse_requirement(line)
        marker, requirement.marker = requirement.marker, None
        if marker is None or any(marker.evaluate({**target, "extra": extra}) for extra in ("", *wanted)):
            yield str(requirement)


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


def pins(constraints: str) -> dict[str, str]:
    """Canonical name -> version, from the lines that pin one."""
    return {name: one.version for name, one in locked_packages(constraints).items()}
