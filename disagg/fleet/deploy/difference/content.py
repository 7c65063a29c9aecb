"""What a host's current release and its environment hold: one probe, one parser."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.probe import ProbeOutput, run_probe
from disagg.fleet.machine.base import Machine

_PROBE: Final = str(Path(__file__).with_name("content.sh"))
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Content:
    """files: SHA-256 by path below the release. settings: the lines of those that a person reads: hosts.toml and the
    service's definitions. packages: installed versions by canonical name."""

    files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


def is_setting(path: str) -> bool:
    """Whether a file of a release is one of `Content.settings`."""
    return path == "hosts.toml" or path.startswith("service/")


def read_content(machine: Machine, facts: HostFacts) -> Content:
    """What the current release holds; nothing if there is none. Raises HostUnreachable, or FleetError if the probe
    fails."""
    if facts.current not in facts.own_releases:
        return Content()
    environment = facts.paths.environment(facts.environment_of(facts.current))
    argv = (facts.paths.release(facts.current), environment)
    return parse(run_probe(machine, _PROBE, argv, timeout=_TIMEOUT_S))


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
