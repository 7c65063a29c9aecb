"""The files of keys of the gateways' clients, on the gateways that are deployed elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from disagg.config import Fleet, Host
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.facts.server import read_server_facts
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import HostOutcome, each

MAX_FILE = 16 << 20  # bytes; a key has some 250


def gateways(fleet: Fleet) -> list[Host]:
    """The gateways that have files of keys of their own."""
    return [host for host in fleet.hosts.values() if host.gateway and host.placement.deployed]


def fetch_keys(
    hosts: Sequence[Host], connect: Callable[[Host], Machine] = machine_for
) -> list[HostOutcome[bytes | None]]:
    """The content of each host's file of keys, empty if there is none; None if nothing is deployed there."""

    def fetch(host: Host) -> bytes | None:
        with closing(connect(host)) as machine:
            facts = read_server_facts(machine, host.name, None)
            if not facts.current:
                return None
            return machine.read(HostPaths(facts.home, host.name).keys, limit=MAX_FILE) or b""

    return each(hosts, fetch)


def deliver_keys(
    hosts: Sequence[Host], content: bytes, connect: Callable[[Host], Machine] = machine_for
) -> list[HostOutcome[bool]]:
    """Write the file of keys to each host; a running gateway notices it.

    False: nothing is deployed there, and `disagg deploy` will bring the keys.
    """

    def deliver(host: Host) -> bool:
        with closing(connect(host)) as machine:
            facts = read_server_facts(machine, host.name, None)
            if facts.current:
                machine.write(HostPaths(facts.home, host.name).keys, content, mode=0o600)
            return bool(facts.current)

    return each(hosts, deliver)
