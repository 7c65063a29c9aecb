"""Run checks on a machine: lines for sh that exit with 0 if something is as it should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from disagg.fleet.facts.probe import ProbeOutput, number, run_probe
from disagg.fleet.machine.base import Machine

_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """found: the first line that the check printed."""

    ok: bool
    found: str = ""


@dataclass(frozen=True, slots=True)
class CheckedMachine:
    """os: Linux or Darwin. user, uid: of the account that is logged in. sudo: without a password."""

    os: str
    user: str
    uid: int = 1000
    sudo: bool = False
    results: Mapping[str, CheckResult] = field(default_factory=dict)

    @property
    def root(self) -> bool:
        """Whether the account is root, or may become it."""
        return self.sudo or self.uid == 0


def run_checks(machine: Machine, checks: Mapping[str, str]) -> CheckedMachine:
    """The results of these checks by name. Raises HostUnreachable, or FleetError if they cannot be run."""
    argv = [word for pair in checks.items() for word in pair]
    return parse(run_probe(machine, "checks.sh", argv, timeout=_TIMEOUT_S))


def parse(probe: ProbeOutput) -> CheckedMachine:
    """The results in what the probe printed."""
    os, user, uid, sudo = probe.first("system", 4)
    results = {name: CheckResult(code == "0", found) for name, code, found in probe.all("check", 3)}
    return CheckedMachine(os, user, number(uid) or 0, sudo == "1", results)
