"""How a deployed host's server fares, as its machine tells it: one script, one round trip, one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, get_args

from disagg.config import Host, ServiceManager
from disagg.errors import FleetError
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.output import last_lines

_LOOK: Final = Path(__file__).with_name("server.sh")
_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Holder:
    """Who listens on a port. `pid` is None and `name` empty where the machine does not tell."""

    pid: int | None
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})" if self.pid is not None else "another program"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One host's server.

    pid: of the server's process, None where none runs; release: what it runs, or ran last; current: what is deployed,
    empty where nothing is. managers: which know this host, and whether they keep its server running now. restarts:
    how often the manager started it again. ports: who listens on the host's ports. log: its last 50 lines.
    """

    home: str
    current: str = ""
    release: str = ""
    pid: int | None = None
    managers: Mapping[ServiceManager, bool] = field(default_factory=dict)
    restarts: int = 0
    token_digest: str = ""
    ports: Mapping[int, Holder] = field(default_factory=dict)
    log: tuple[str, ...] = ()

    @property
    def supervised(self) -> bool:
        """Whether a manager keeps the server running: starts it again when it ends."""
        return any(self.managers.values())

    @property
    def port_conflict(self) -> tuple[int, Holder] | None:
        """The first of the host's ports that another program has."""
        for port, holder in self.ports.items():
            if self.pid is None or (holder.pid is not None and holder.pid != self.pid):
                return port, holder
        return None


def read_server_facts(machine: Machine, name: str, host: Host | None) -> ServerFacts:
    """Look at the server of host `name` on this machine. `host`: None where hosts.toml no longer has it.

    HostUnreachable where the machine does not answer, FleetError where it answers something else."""
    ports = [str(port) for port in (host.port, host.kv_port) if port is not None] if host is not None else []
    result = machine.run([name, *ports], script=_LOOK.read_text(encoding="utf-8"), timeout=_TIMEOUT_S)
    lines = [line.split("\t") for line in result.stdout.split("\n")]
    if ["end"] not in lines:
        words = last_lines(result.stderr or result.stdout, 3) or "no answer"
        raise FleetError(f"{name}: its machine does not tell how it fares: {words}", f"disagg ssh {name}")
    return parse(lines)


def parse(lines: list[list[str]]) -> ServerFacts:
    """The facts in what the script printed, split at tabs."""
    said: dict[str, list[list[str]]] = {}
    for kind, *fields in lines:
        said.setdefault(kind, []).append(fields)

    def first(kind: str) -> str:
        return said[kind][0][0] if kind in said else ""

    pid, release, alive = (said.get("serving") or [["", "", "0"]])[0]
    known: tuple[ServiceManager, ...] = get_args(ServiceManager)
    managers = {one: fields for one in known for fields in said.get("manager", []) if fields[0] == one}
    return ServerFacts(
        home=first("home"),
        current=first("current"),
        release=release,
        pid=int(pid) if alive == "1" else None,
        managers={name: fields[1] == "1" for name, fields in managers.items()},
        restarts=max((int(fields[2]) for fields in managers.values() if fields[2].isdigit()), default=0),
        token_digest=first("token"),
        ports={
            int(port): Holder(int(pid) if pid.isdigit() else None, name) for port, pid, name in said.get("port", [])
        },
        log=tuple(line for (line,) in said.get("log", [])),
    )
