"""The machine behind a host of hosts.toml."""

from __future__ import annotations

from disagg.config import Host
from disagg.fleet.machine.base import Machine


def machine_for(host: Host, timeout: float | None = None) -> Machine:
    """The machine behind a host, by its connector. Connects when first used; close it.

    timeout: seconds for each step of connecting (TCP, key exchange, login), instead of the defaults.
    """
    if host.placement.spawned:
        from disagg.fleet.machine.local import LocalMachine

        return LocalMachine(host.name)
    from disagg.fleet.machine.ssh.machine import SSHMachine
    from disagg.fleet.machine.ssh.settings import SSHTimeouts

    return SSHMachine(host, timeouts=SSHTimeouts() if timeout is None else SSHTimeouts(*[max(0.2, timeout)] * 5))
