"""The servers of hosts, as their machines report them: one with its ports and log, or all of a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, get_args

import tomli

from disagg.config import Host, ServiceManager
from disagg.fleet.facts.probe import ProbeOutput, number, run_probe
from disagg.fleet.machine.machine import Machine

_SERVER_S: Final = 30.0
_CONTENTS_S: Final = 60.0
_MANAGERS: Final[tuple[ServiceManager, ...]] = get_args(ServiceManager)


@dataclass(frozen=True, kw_only=True)
class InstalledServer:
    """The server of one host on a machine: what is deployed of it, and what runs. Every probe reports this.

    current: the release that was deployed last, "" if none was; switched: since when, in seconds since 1970. previous:
    that of `disagg rollback`. service: the one that its service manager starts, also after a crash or a reboot.
    release: what it runs, or ran last. pid: of its process, None if none runs. token_digests: of the tokens that it
    accepts, the current one first; token_mode: of their file. keys_digest: of the clients' keys, on a gateway.
    """

    current: str = ""
    switched: int | None = None
    previous: str = ""
    service: str = ""
    release: str = ""
    pid: int | None = None
    token_digests: tuple[str, ...] = ()
    token_mode: str = ""
    keys_digest: str = ""

    @property
    def runs(self) -> str:
        """The release that serves now; "" if none does."""
        return self.release if self.pid is not None else ""


def installed(probe: ProbeOutput) -> InstalledServer:
    """What the function `emit_server` of probe.sh printed."""
    pid, release, alive = probe.first("serving", 3)
    return InstalledServer(
        current=probe.text("current"),
        switched=number(probe.text("switched")),
        previous=probe.text("previous"),
        service=probe.text("running"),
        release=release,
        pid=number(pid) if alive == "1" else None,
        token_digests=tuple(digest for (digest,) in probe.all("token", 1)),
        token_mode=probe.first("token", 2)[1],
        keys_digest=probe.text("keys"),
    )


@dataclass(frozen=True, slots=True)
class PortHolder:
    """The program that listens on a port. pid: None, and name "", if only root may see it."""

    pid: int | None
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid is not None else "another program"


@dataclass(frozen=True)
class ServerFacts(InstalledServer):
    """One host's server. model: of the deployed release, "" if unknown. managers: those that have a definition of this
    host, and whether each supervises a running server. restarts: how often the manager restarted it. ports: who listens
    on the host's ports. log: its last 50 lines."""

    home: str
    model: str = ""
    managers: Mapping[ServiceManager, bool] = field(default_factory=dict)
    restarts: int = 0
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
    probe = run_probe(machine, "server.sh", [name, *ports], timeout=_SERVER_S)
    managers = {one: fields for one in _MANAGERS for fields in probe.all("manager", 3) if fields[0] == one}
    return ServerFacts(
        home=probe.text("home"),
        model=probe.text("model"),
        managers={name: active == "1" for name, (_, active, _) in managers.items()},
        restarts=max((number(restarts) or 0 for _, _, restarts in managers.values()), default=0),
        ports={int(port): PortHolder(number(pid), name) for port, pid, name in probe.all("port", 3)},
        log=tuple(line for (line,) in probe.all("log", 1)),
        **asdict(installed(probe)),
    )


@dataclass(frozen=True)
class FoundHost(InstalledServer):
    """A host that has a folder or a service on a machine. folder: whether it has one. fleets: the names of the fleets
    in its releases. environments: of its releases. sources: of their models. locked: a command changes it now."""

    name: str
    folder: bool = True
    fleets: frozenset[str] = frozenset()
    releases: int = 0
    environments: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()
    managers: tuple[ServiceManager, ...] = ()
    locked: bool = False


@dataclass(frozen=True, slots=True)
class MachineContents:
    """All of disagg on a machine for one account, whichever fleet it belongs to. machine: identifies both. carried:
    folders of models that deployments copied. cached: folders of the hub's cache."""

    machine: str
    home: str
    hosts: tuple[FoundHost, ...] = ()
    environments: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()


def read_contents(machine: Machine) -> MachineContents:
    """What is on this machine. Raises HostUnreachable, or FleetError if the probe fails."""
    probe = run_probe(machine, "machine_content.sh", [], timeout=_CONTENTS_S)
    return MachineContents(
        "/".join(probe.first("machine", 3)),
        probe.text("home"),
        tuple(map(_found, _by_host(probe))),
        tuple(name for (name,) in probe.all("environment", 1)),
        tuple(name for (name,) in probe.all("carried", 1)),
        tuple(name for (name,) in probe.all("cached", 1)),
    )


def _by_host(probe: ProbeOutput) -> Iterator[ProbeOutput]:
    """The lines of each host: from its own on to the next one's."""
    starts = [index for index, line in enumerate(probe.lines) if line[0] == "host"]
    for start, end in zip(starts, [*starts[1:], len(probe.lines)], strict=False):
        yield ProbeOutput(probe.lines[start:end])


def _found(lines: ProbeOutput) -> FoundHost:
    releases = list(lines.all("release", 3))
    managers = {name for (name,) in lines.all("manager", 1)}
    return FoundHost(
        name=lines.text("host"),
        folder=lines.has("folder"),
        fleets=frozenset(_texts([name for _, _, name in releases])),
        releases=len(releases),
        environments=frozenset(environment for _, environment, _ in releases if environment),
        sources=frozenset(_texts([source for (source,) in lines.all("source", 1)])),
        managers=tuple(one for one in _MANAGERS if one in managers),
        locked=lines.has("locked"),
        **asdict(installed(lines)),
    )


def _texts(values: Sequence[str]) -> Iterator[str]:
    """TOML strings as texts; what is no string is left out."""
    for value in values:
        try:
            text = tomli.loads(f"value = {value}")["value"]
        except tomli.TOMLDecodeError:
            continue
        if isinstance(text, str):
            yield text
