"""Brings the keys of the gateway's clients to the gateways, between two deployments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from disagg.config import Fleet, Host
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.facts.server import read_server_facts
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import HostOutcome, each
from disagg.token import keys_path


def deliver_keys(fleet: Fleet, connect: Callable[[Host], Machine] = machine_for) -> list[HostOutcome[bool]]:
    """Write this machine's file of keys to every gateway that is deployed elsewhere; a running one notices it.

    False: nothing is deployed there, and `disagg deploy` will bring the keys.
    """
    content = keys_path(fleet).read_bytes()

    def deliver(host: Host) -> bool:
        with closing(connect(host)) as machine:
            facts = read_server_facts(machine, host.name, None)
            if facts.current:
                machine.write(HostPaths(facts.home, host.name).keys, content, mode=0o600)
            return bool(facts.current)

    return each([host for host in fleet.hosts.values() if host.gateway and host.placement.deployed], deliver)
