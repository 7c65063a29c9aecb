"""The machines behind the hosts of hosts.toml."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import Lock

from disagg.config import Host
from disagg.fleet.machine.machine import Machine

Connect = Callable[[Host], Machine]
"""Makes a host's machine: `machine_for`, or a test's."""


def machine_for(host: Host, timeout: float | None = None) -> Machine:
    """The machine behind a host, by its connector. Connects when first used; close it.

    timeout: seconds for each step of connecting (TCP, key exchange, login), instead of the defaults.
    """
    if host.server_kind.spawned:
        from disagg.fleet.machine.local import LocalMachine

        return LocalMachine(host.name)
    from disagg.fleet.machine.ssh.machine import SSHMachine
    from disagg.fleet.machine.ssh.settings import SSHTimeouts

    return SSHMachine(host, timeouts=SSHTimeouts() if timeout is None else SSHTimeouts(*[max(0.2, timeout)] * 5))


class Machines:
    """The machines of some hosts, one each, which stay connected until all are closed. Safe for several threads."""

    def __init__(self, connect: Connect = machine_for) -> None:
        self._connect = connect
        self._machines: dict[str, Machine] = {}
        self._guard = Lock()

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, host: Host) -> Machine:
        with self._guard:
            if host.name not in self._machines:
                self._machines[host.name] = self._connect(host)
            return self._machines[host.name]

    def close(self) -> None:
        """Close every connection, also if closing one of them fails."""
        with ExitStack() as closing:
            for one in self._machines.values():
                closing.callback(one.close)
