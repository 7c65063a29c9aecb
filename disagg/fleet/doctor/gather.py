"""Everything `disagg doctor` reads on one host, over one connection. A failed reading does not prevent others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, FleetError, HostUnreachable
from disagg.fleet.facts.host import Clock, HostFacts, read_clock, read_host_facts
from disagg.fleet.facts.python import last_json, python_on, run_program
from disagg.fleet.machine.machine import Machine
from disagg.fleet.models.inventory import RequiredModel, StoredModel, required_model, stored_models

REACH: Final = Path(__file__).with_name("reach_program.py")


@dataclass(frozen=True, slots=True)
class HostReadings:
    """What was read on a host. latency: seconds of one command on the open connection. required, stored: the models
    that it needs and what it has of them, by their names. reach: "address port" -> 0, or
    the errno with which a connection from this host failed. errors: of readings that failed."""

    host: Host
    facts: HostFacts
    clock: Clock | None = None
    latency: float = 0.0
    python: str | None = None
    required: dict[str, RequiredModel] = field(default_factory=dict)
    stored: dict[str, StoredModel] = field(default_factory=dict)
    reach: dict[str, int] = field(default_factory=dict)
    errors: tuple[DisaggError, ...] = ()


def examine_host(fleet: Fleet, host: Host, machine: Machine, peers: Sequence[Host]) -> HostReadings:
    """Read a host. peers: hosts that a program on it has to reach. Raises HostUnreachable, and FleetError if its facts
    cannot be read."""
    facts = read_host_facts(machine, host)
    began = time.monotonic()
    machine.run(["true"], timeout=15.0)
    latency = time.monotonic() - began
    python = python_on(host, facts)
    clock = read_clock(machine, python)
    wanted = {one.model: required_model(fleet, one, facts) for one in fleet.run_by(host)}
    errors: list[DisaggError] = []
    stored: dict[str, StoredModel] = {}
    reach: dict[str, int] = {}
    if python is not None:
        try:
            if sources := list(dict.fromkeys(one.source for one in wanted.values())):
                found = stored_models(machine, python, host, sources)
                stored = {name: found[one.source] for name, one in wanted.items()}
            if facts.os == "Darwin" and peers:
                reach = _reach(machine, python, peers)
        except HostUnreachable:
            raise
        except FleetError as error:
            errors.append(error)
    return HostReadings(host, facts, clock, latency, python, wanted, stored, reach, tuple(errors))


def _reach(machine: Machine, python: str, peers: Sequence[Host]) -> dict[str, int]:
    """Connect from this host to its peers' sshd, which listens whether or not they serve."""
    places = [f"{peer.address} {peer.ssh_port or 22}" for peer in peers]
    result = run_program(machine, python, REACH, places, timeout=5.0 + 4 * len(places))
    return last_json(result, machine, dict[str, int])
