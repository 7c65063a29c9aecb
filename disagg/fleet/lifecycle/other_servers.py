"""Stop the servers of disagg that no host of this hosts.toml stands for.

These are local servers of hosts that were removed from hosts.toml, servers of this user's other fleets on this machine,
and hosts that are deployed on the same machines under other names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from disagg.config import Fleet, Host
from disagg.config.addresses import same_machine
from disagg.errors import DisaggError
from disagg.fleet.changes.audit import audited_here
from disagg.fleet.changes.fleet_locks import LockedPlace
from disagg.fleet.facts.server import read_server_facts
from disagg.fleet.lifecycle.base import ServerOutcome, ServerResult
from disagg.fleet.lifecycle.deployed import hosts_there, stop_there
from disagg.fleet.lifecycle.local import end_recorded
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.connect import Machines
from disagg.fleet.machine.fan_out import each


def stop_recorded(state: State, name: str, shown: str, grace_s: float) -> ServerResult:
    """Stop a local server by its record alone. shown: its name in the result. A DisaggError becomes a failed result."""
    began = time.monotonic()
    try:
        running = state.running_pid(name) is not None
        with audited_here(state.audit_file(name), "stop"):
            killed = end_recorded(state, name, grace_s)
    except DisaggError as error:
        return ServerResult(shown, "failed", time.monotonic() - began, error)
    outcome: ServerOutcome = "killed" if killed else "stopped" if running else "not running"
    return ServerResult(shown, outcome, time.monotonic() - began if running else 0.0)


def stop_other_fleet(state: State, grace_s: float) -> list[ServerResult]:
    """Stop the local servers of another fleet of this user; results of those that ran, or that failed to stop."""
    fleet = state.shown
    try:
        with state.locked("stop"):
            results = [stop_recorded(state, name, f"{name} of {fleet}", grace_s) for name in state.recorded_hosts()]
            return [result for result in results if result.outcome != "not running"]
    except DisaggError as error:
        return [ServerResult(f"fleet {fleet}", "failed", error=error)]


def other_places(fleet: Fleet, hosts: Sequence[Host], machines: Machines) -> list[LockedPlace]:
    """What is deployed on these hosts' machines under names that the fleet does not have. A machine that does not
    answer has a failed result of its own."""
    found = each([host for host in hosts if host.server_kind.deployed], lambda host: hosts_there(machines[host]))
    places = {
        (same_machine(one.host.address), name): LockedPlace(one.host, name)
        for one in found
        for name in one.value or ()
        if name not in fleet.hosts
    }
    return list(places.values())


def stop_other_host(machine: Machine, place: LockedPlace) -> ServerResult:
    """Stop a server that `other_places` found, under its lock. A DisaggError becomes a failed result."""
    began, shown = time.monotonic(), f"{place.name} on {place.machine.name}"
    try:
        stop_there(machine, place.name, read_server_facts(machine, place.name, None))
    except DisaggError as error:
        return ServerResult(shown, "failed", time.monotonic() - began, error)
    return ServerResult(shown, "stopped", time.monotonic() - began)
