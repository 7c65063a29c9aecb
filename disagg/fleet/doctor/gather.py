"""Everything `disagg doctor` reads on one host, over one connection. A failed reading does not prevent others."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, FleetError, HostUnreachable
from disagg.fleet.facts.hardware import Clock, read_clock
from disagg.fleet.facts.host import HostFacts, read_host_facts
from disagg.fleet.facts.python import python_on
from disagg.fleet.machine.base import Machine
from disagg.fleet.models.inventory import StoredModel, stored_models
from disagg.fleet.models.sources import RequiredModel, required_model

_REACH: Final = """\
import json, socket, sys
results = {}
for place in sys.argv[1:]:
    address, _, port = place.rpartition(" ")
    try:
        socket.create_connection((address, int(port)), timeout=3).close()
        results[place] = 0
    except OSError as error:
        results[place] = error.errno or -1
print(json.dumps(results))
"""


@dataclass(frozen=True, slots=True)
class HostReadings:
    """What was read on a host. latency: seconds of one command on the open connection. reach: "address port" -> 0, or
    the errno with which a connection from this host failed. errors: of readings that failed."""

    host: Host
    facts: HostFacts
    clock: Clock | None = None
    latency: float = 0.0
    python: str | None = None
    required: RequiredModel | None = None
    model: StoredModel | None = None
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
    wanted = required_model(fleet, host, facts)
    errors: list[DisaggError] = []
    model: StoredModel | None = None
    reach: dict[str, int] = {}
    if python is not None:
        try:
            model = stored_models(machine, python, host, [wanted.source])[wanted.source]
            if facts.os == "Darwin" and peers:
                reach = _reach(machine, python, peers)
        except HostUnreachable:
            raise
        except FleetError as error:
            errors.append(error)
    return HostReadings(host, facts, clock, latency, python, wanted, model, reach, tuple(errors))


def _reach(machine: Machine, python: str, peers: Sequence[Host]) -> dict[str, int]:
    """Connect from this host to its peers' sshd, which listens whether or not they serve."""
    places = [f"{peer.address} {peer.ssh_port or 22}" for peer in peers]
    result = machine.run([python, "-I", "-c", _REACH, *places], timeout=5.0 + 4 * len(places))
    try:
        results = json.loads(result.stdout)
    except ValueError as error:
        raise FleetError(f"{machine.name}: the connection probe printed no JSON") from error
    return {str(place): int(number) for place, number in results.items()}
