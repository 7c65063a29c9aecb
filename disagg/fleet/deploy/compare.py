"""What a deployment changes on a host: the target state compared with its current release and environment."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from packaging.utils import canonicalize_name

from disagg.fleet.deploy.environment import Environment
from disagg.fleet.deploy.release import LIST, TargetState, digest
from disagg.fleet.deploy.steps import Plan, PutTree, WriteFile
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.probe import ProbeOutput, run_probe
from disagg.fleet.machine.machine import Machine
from disagg.fleet.machine.upload import size_of, split
from disagg.version import DIGESTS

_OF_VENV: Final = frozenset({"pip", "setuptools", "wheel"})
_TIMEOUT_S: Final = 60.0


FileChange = Literal["added", "changed", "removed"]


@dataclass(frozen=True, slots=True)
class PackageChange:
    """before, after: versions, "" for a package that is not installed."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Difference:
    """What a plan changes. files: of the release, by path, without settings. settings: lines of a unified diff of
    hosts.toml and the service's definitions. packages: of the environment, as far as the lock names them. Both are
    empty for a host without a release. to_send: bytes, before compression. to_download: bytes of packages at most,
    without what the host's installer has cached."""

    files: Mapping[str, FileChange] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    packages: tuple[PackageChange, ...] = ()
    to_send: int = 0
    to_download: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "files": dict(self.files),
            "settings": list(self.settings),
            "packages": [asdict(one) for one in self.packages],
            "to_send": self.to_send,
            "to_download": self.to_download,
        }


def difference(desired: TargetState, plan: Plan, facts: HostFacts, there: Content) -> Difference:
    """What the plan for the target state changes on a host. there: what the host's current release holds."""
    environment = desired.environment
    builds = any(step.name == "environment" for step in plan.steps)
    downloads = builds and not environment.site_packages and not environment.wheels
    known = bool(there.files)
    rebuilt = known and facts.environment_of(facts.current) != environment.hash
    return Difference(
        dict(_files(desired.files, there.files)) if known else {},
        tuple(_settings(desired.settings, there.settings)) if known else (),
        tuple(_packages(environment, there.packages)) if rebuilt else (),
        sum(_sent(plan, facts)),
        plan.package_bytes if downloads else 0,
    )


def _files(wanted: Mapping[str, bytes], there: Mapping[str, str]) -> Iterator[tuple[str, FileChange]]:
    for name in sorted(wanted.keys() | there.keys()):
        if is_setting(name) or name == DIGESTS:  # these follow from the others
            continue
        if name not in there:
            yield name, "added"
        elif name not in wanted:
            yield name, "removed"
        elif digest(wanted[name]) != there[name]:
            yield name, "changed"


def _settings(wanted: Mapping[str, bytes], there: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """A unified diff, file by file."""
    for name in sorted(filter(is_setting, wanted.keys() | there.keys())):
        before, after = there.get(name, ()), wanted.get(name, b"").decode().splitlines()
        yield from difflib.unified_diff(before, after, f"{name} (current)", f"{name} (new)", lineterm="")


def _packages(environment: Environment, there: Mapping[str, str]) -> Iterator[PackageChange]:
    """Versions that change. A package that is not installed counts only if the lock's own files will be installed:
    another build, such as torch's for the CPU, does not need all of the lock's packages."""
    locked, certain = environment.packages, environment.hashed
    if not locked:
        return
    for name in sorted(locked.keys() | there.keys()):
        before, after = there.get(name, ""), locked[name].version if name in locked else ""
        if before.partition("+")[0] == after or (name in _OF_VENV and not after) or not (before or name in certain):
            continue
        yield PackageChange(name, before, after)


def _sent(plan: Plan, facts: HostFacts) -> Iterator[int]:
    """Bytes of each file that the plan sends, without the parts that a broken-off upload has left there."""
    for step in plan.steps:
        match step.action:
            case PutTree(_, files, parts):
                yield from map(size_of, files.values())
                if parts:
                    yield -sum(facts.uploads.get(file.part, 0) for file in split(files)[1])
            case WriteFile(_, content):
                yield len(content)


@dataclass(frozen=True, slots=True)
class Content:
    """files: SHA-256 by path below the release. settings: the lines of those that a person reads: hosts.toml and the
    service's definitions. packages: installed versions by canonical name."""

    files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


def is_setting(path: str) -> bool:
    """Whether a file of a release is one of `Content.settings`."""
    return path in ("hosts.toml", LIST) or path.startswith("service/")


def read_content(machine: Machine, facts: HostFacts) -> Content:
    """What the current release holds; nothing if there is none. Raises HostUnreachable, or FleetError if the probe
    fails."""
    if facts.current not in facts.own_releases:
        return Content()
    environment = facts.paths.environment(facts.environment_of(facts.current))
    argv = (facts.paths.release(facts.current), environment)
    return parse(run_probe(machine, "release_content.sh", argv, timeout=_TIMEOUT_S))


def parse(probe: ProbeOutput) -> Content:
    """The content in what the probe printed."""
    settings: dict[str, list[str]] = defaultdict(list)
    for _, name, *fields in (line for line in probe.lines if line[0] == "text" and len(line) > 2):
        settings[name].append("\t".join(fields))
    installed = (folder.partition("-") for (folder,) in probe.all("package", 1))
    return Content(
        {name: digest for digest, name in probe.all("file", 2)},
        {name: tuple(lines) for name, lines in settings.items()},
        {canonicalize_name(name): version for name, _, version in installed},
    )
