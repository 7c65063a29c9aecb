"""Everything of disagg on a machine, whichever host and fleet it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import tomli

from disagg.config import ServiceManager
from disagg.fleet.facts.probe import ProbeOutput, number, run_probe
from disagg.fleet.machine.base import Machine

_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class FoundHost:
    """A host that has a folder or a service on a machine. folder: whether it has one. fleets: the names of the fleets
    in its releases. environments: of its releases. sources: of their models. pid: of its server, None if none runs.
    locked: a command changes it now."""

    name: str
    folder: bool = True
    fleets: frozenset[str] = frozenset()
    releases: int = 0
    environments: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()
    managers: tuple[ServiceManager, ...] = ()
    token_digests: tuple[str, ...] = ()
    pid: int | None = None
    locked: bool = False


@dataclass(frozen=True, slots=True)
class MachineContents:
    """What is on a machine for one account. machine: identifies both. carried: folders of models that deployments
    copied. cached: folders of the hub's cache."""

    machine: str
    home: str
    hosts: tuple[FoundHost, ...] = ()
    environments: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()


def read_contents(machine: Machine) -> MachineContents:
    """What is on this machine. Raises HostUnreachable, or FleetError if the probe fails."""
    return parse(run_probe(machine, "machine_content.sh", [], timeout=_TIMEOUT_S))


def parse(probe: ProbeOutput) -> MachineContents:
    """The contents in what the probe printed."""
    return MachineContents(
        "/".join(probe.first("machine", 3)),
        probe.text("home"),
        tuple(map(_found, _by_host(probe))),
        tuple(name for (name,) in probe.all("environment", 1)),
        tuple(name for (name,) in probe.all("carried", 1)),
        tuple(name for (name,) in probe.all("cached", 1)),
    )


def _by_host(probe: ProbeOutput) -> Iterator[ProbeOutput]:
    """The lines of each host: from its own on to the next one's."""
    starts = [index for index, line in enumerate(probe.lines) if line[0] == "host"]
    for start, end in zip(starts, [*starts[1:], len(probe.lines)], strict=False):
        yield ProbeOutput(probe.lines[start:end])


def _found(lines: ProbeOutput) -> FoundHost:
    releases = list(lines.all("release", 3))
    pid, _, alive = lines.first("serving", 3)
    known: tuple[ServiceManager, ...] = get_args(ServiceManager)
    managers = {name for (name,) in lines.all("manager", 1)}
    return FoundHost(
        lines.text("host"),
        lines.has("folder"),
        frozenset(_texts([name for _, _, name in releases])),
        len(releases),
        frozenset(environment for _, environment, _ in releases if environment),
        frozenset(_texts([source for (source,) in lines.all("source", 1)])),
        tuple(one for one in known if one in managers),
        tuple(digest for (digest,) in lines.all("token", 1)),
        number(pid) if alive == "1" else None,
        lines.has("locked"),
    )


def _texts(values: Sequence[str]) -> Iterator[str]:
    """TOML strings as texts; what is no string is left out."""
    for value in values:
        try:
            text = tomli.loads(f"value = {value}")["value"]
        except tomli.TOMLDecodeError:
            continue
        if isinstance(text, str):
            yield text
