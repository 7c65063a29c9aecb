"""What keeps a server running on its host: systemd, launchd, or a supervisor of our own.

base       a service definition, and the commands that drive it
systemd    a user unit, with linger
launchd    a daemon of the system domain
process    supervise.py, started detached
supervise  that supervisor: standard library only, never imported

All of them run `current/run` of the host's folder, so that a definition changes only when the folder moves: what a
release brings is in its own `run`.
"""

from __future__ import annotations

from typing import Final, Protocol

from disagg.config import Host, ServiceManager
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.services import launchd, process, systemd
from disagg.fleet.services.base import Command, Definition, Verb

__all__ = ["Command", "Definition", "Verb", "command", "definitions"]


class _Manager(Protocol):
    def definitions(self, host: Host, facts: HostFacts) -> tuple[Definition, ...]: ...

    def command(self, facts: HostFacts, verb: Verb) -> Command: ...


_MANAGERS: Final[dict[ServiceManager, _Manager]] = {"systemd": systemd, "launchd": launchd, "process": process}


def definitions(host: Host, facts: HostFacts) -> tuple[Definition, ...]:
    """The files that the host's service manager must have."""
    return _MANAGERS[host.service].definitions(host, facts)


def command(service: ServiceManager, facts: HostFacts, verb: Verb) -> Command:
    """How to start, stop, restart or remove the host's service."""
    return _MANAGERS[service].command(facts, verb)
