"""The server of one host, as its machine reports it: process, release, service manager, ports, log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, get_args

from disagg.config import Host, ServiceManager
from disagg.fleet.facts.probe import ProbeOutput, number, run_probe
from disagg.fleet.machine.base import Machine

_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class PortHolder:
    """The program that listens on a port. pid: None, and name "", if only root may see it."""

    pid: int | None
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid is not None else "another program"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One host's server.

    pid: of its process, None if none runs. release: what it runs, or ran last. model: of the deployed release, "" if
    unknown. current: the deployed release, "" if none is. running: the one that its manager starts, "" if no
    link names it. managers: those that have a definition of this host, and whether each supervises a running server.
    restarts: how often the manager restarted it. token_digests: of the tokens it accepts, the current one first. ports:
    who listens on the host's ports. log: its last 50 lines.
    """

    home: str
    current: str = ""
    running: str = ""
    model: str = ""
    release: str = ""
    pid: int | None = None
    managers: Mapping[ServiceManager, bool] = field(default_factory=dict)
    restarts: int = 0
    token_digests: tuple[str, ...] = ()
    ports: Mapping[int, PortHolder] = field(default_factory=dict)
    log: tuple[str, ...] = ()

    @property
    def supervised(self) -> bool:
        """Whether a service manager restarts the server when it ends."""
        return any(self.managers.values())

    @property
    def port_conflict(self) -> tuple[int, PortHolder] | None:
        """The first of the host's ports that another program has, and that program."""
        for port, holder in self.ports.items():
            if self.pid is None or (holder.pid is not None and holder.pid != self.pid):
                return port, holder
        return None


def read_server_facts(machine: Machine, name: str, host: Host | None) -> ServerFacts:
    """The facts of the server of host `name` on this machine. host: None if hosts.toml no longer has it.

    Raises HostUnreachable, or FleetError if the probe fails.
    """
    ports = [str(port) for port in (host.port, host.kv_port) if port is not None] if host is not None else []
    return parse(run_probe(machine, "server.sh", [name, *ports], timeout=_TIMEOUT_S))


def parse(probe: ProbeOutput) -> ServerFacts:
    """The facts in what the probe printed."""
    pid, release, alive = probe.first("serving", 3)
    known: tuple[ServiceManager, ...] = get_args(ServiceManager)
    managers = {one: fields for one in known for fields in probe.all("manager", 3) if fields[0] == one}
    return ServerFacts(
        home=probe.text("home"),
        current=probe.text("current"),
        running=probe.text("running"),
        model=probe.text("model"),
        release=release,
        pid=number(pid) if alive == "1" else None,
        managers={name: active == "1" for name, (_, active, _) in managers.items()},
        restarts=max((number(restarts) or 0 for _, _, restarts in managers.values()), default=0),
        token_digests=tuple(digest for (digest,) in probe.all("token", 1)),
        ports={int(port): PortHolder(number(pid), name) for port, pid, name in probe.all("port", 3)},
        log=tuple(line for (line,) in probe.all("log", 1)),
    )
