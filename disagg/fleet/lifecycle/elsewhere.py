"""Servers on this machine that another hosts.toml of this user has started, such as a copy of this fleet's."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import NamedTuple

from disagg.config import Host
from disagg.errors import FleetError
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine import process as local


class StartedElsewhere(NamedTuple):
    """hosts_file: the hosts.toml of the fleet that has started it. host: its name there."""

    hosts_file: str
    host: str

    @property
    def stop_command(self) -> str:
        return f"disagg stop --config {shlex.quote(self.hosts_file)} --host {self.host}"


def started_elsewhere(state: State, host: Host, port: int | None = None) -> StartedElsewhere | None:
    """What listens on a local host's port if another fleet of this user has started it. state: of the host's fleet.
    port: another port of the host."""
    if not host.placement.spawned:
        return None
    with suppress(FleetError):  # of a folder that cannot be read
        for other in state.others():
            for name in other.recorded_hosts():
                if _has_started(other, name, port or host.port):
                    return StartedElsewhere(other.shown, name)
    return None


def _has_started(state: State, name: str, port: int) -> bool:
    """Whether the fleet of this state has started what listens on the port, as this host. False if its record is
    damaged."""
    with suppress(FleetError):
        record = state.recorded(name)
        return record is not None and local.identity(record.pid) == record.identity and local.listens(record.pid, port)
    return False
