"""The key files of the gateways that are deployed elsewhere, with the keys of their clients: fetched and replaced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from disagg.config import Fleet, Host
from disagg.errors import HostLocked
from disagg.fleet.changes.locks import locked
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.facts.server import read_server_facts
from disagg.fleet.machine import interruption
from disagg.fleet.machine.connect import Connect, machine_for
from disagg.fleet.machine.fan_out import HostOutcome, each
from disagg.fleet.machine.machine import Machine

MAX_FILE = 16 << 20  # bytes; a key has some 250
WAIT_S = 20.0  # for another command that changes the host; most take seconds


def gateways(fleet: Fleet) -> list[Host]:
    """The gateways that have files of keys of their own."""
    return [host for host in fleet.deployed_hosts if host.gateway]


def fetch_keys(hosts: Sequence[Host], connect: Connect = machine_for) -> list[HostOutcome[bytes | None]]:
    """The content of each host's file of keys, empty if there is none; None if nothing is deployed there."""

    def fetch(host: Host) -> bytes | None:
        with closing(connect(host)) as machine:
            facts = read_server_facts(machine, host.name, None)
            if not facts.current:
                return None
            return machine.read(HostPaths(facts.home, host.name).keys, limit=MAX_FILE) or b""

    return each(hosts, fetch)


def deliver_keys(
    hosts: Sequence[Host],
    merged: Callable[[str, bytes], bytes],
    connect: Connect = machine_for,
    wait_s: float = WAIT_S,
) -> list[HostOutcome[bool]]:
    """Replace each host's file of keys; a running gateway reads it again. merged: (host, content) -> the new content;
    called on several threads. Nobody else changes the file meanwhile: another command is waited for, up to `wait_s`.

    False: nothing is deployed there, and `disagg deploy` will bring the keys.
    """

    def deliver(host: Host) -> bool:
        with closing(connect(host)) as machine:
            facts = read_server_facts(machine, host.name, None)
            if not facts.current:
                return False
            paths = HostPaths(facts.home, host.name)
            with _in_turn(machine, paths, wait_s):
                there = machine.read(paths.keys, limit=MAX_FILE) or b""
                if (content := merged(host.name, there)) != there:
                    machine.write(paths.keys, content, mode=0o600)
            return True

    return each(hosts, deliver)


@contextmanager
def _in_turn(machine: Machine, paths: HostPaths, wait_s: float) -> Iterator[None]:
    """Hold the host's lock, once nobody else does. HostLocked after so many seconds."""
    deadline = time.monotonic() + wait_s
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(machine, paths, "keys"))
                break
            except HostLocked:
                if time.monotonic() >= deadline:
                    raise
            interruption.sleep(0.5)
        yield
