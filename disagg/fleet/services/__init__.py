"""Service managers, which start a host's server and restart it: systemd, launchd, or disagg's own supervisor.

base       a service definition, and a command
systemd    a user unit, with linger
launchd    a daemon of the system domain
supervise  the supervisor of hosts without a service manager: standard library only, run by path, never imported

All of them run `running/run` of the host's folder, so that a new release needs no new definition. `disagg start` and
`restart` point `running` at the deployed release: until then a crash starts the release again that has run.
"""

from __future__ import annotations

from disagg.config import Host, ServiceManager
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.machine import script
from disagg.fleet.services import launchd, systemd
from disagg.fleet.services.base import VERB_S, Definition, RunScript, Verb

__all__ = ["VERB_S", "Definition", "RunScript", "Verb", "command", "definitions", "needs", "program"]


def program(host: Host) -> str:
    """The Python module that serves a host."""
    if host.keeps:
        return "disagg.keeper"
    return "disagg.gateway" if host.gateway else "disagg.servers"


def needs(host: Host) -> tuple[str, ...]:
    """The extras of disagg without which the program of a host does not start."""
    if host.gateway:
        return ("gateway",)
    return host.engine.kind.needs_for(host.roles)


def definitions(host: Host, facts: HostFacts) -> tuple[Definition, ...]:
    """The definition files that the host's service manager needs."""
    if host.service == "systemd":
        return systemd.definitions(host, facts)
    return launchd.definitions(host, facts) if host.service == "launchd" else ()


def command(service: ServiceManager, paths: HostPaths, verb: Verb) -> RunScript:
    """The command that starts, stops, restarts or removes the host's service."""
    if service == "systemd":
        return systemd.command(paths, verb)
    if service == "launchd":
        return launchd.command(paths, verb)
    return RunScript(script("supervisor.sh"), (paths.folder, "stop" if verb == "remove" else verb), VERB_S)
