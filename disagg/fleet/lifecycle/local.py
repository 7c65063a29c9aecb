"""A server on this machine, spawned from this installation. It is not restarted after a crash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from disagg.api.names import LOG_FILE_VARIABLE
from disagg.config import Fleet, Host, served_digest
from disagg.errors import FleetError, PortInUse, StartFailed
from disagg.fleet.lifecycle.one_server import LAST_LINES, UNDECIDED, ProcessState, start_failed
from disagg.fleet.lifecycle.state import ProcessRecord, State, started_elsewhere
from disagg.fleet.lifecycle.status.host_status import HealthState
from disagg.fleet.machine import process as local
from disagg.fleet.services import program
from disagg.token import TOKEN_FILE_VARIABLE

Argv = Callable[[Fleet, Host], tuple[list[str], dict[str, str]]]
"""Command line and environment variables of the process that serves a host."""


def server_argv(fleet: Fleet, host: Host) -> tuple[list[str], dict[str, str]]:
    """`python -m disagg.servers --config FILE --host NAME`, or `python -m disagg.gateway` for a gateway."""
    python, environment = local.python_command(host.python)
    return [*python, program(host), "--config", str(fleet.path.resolve()), "--host", host.name], environment


@dataclass(slots=True)
class LocalServer:
    """Server for connector "local". argv: builds the command line; tests replace it. own_session: see `spawn`."""

    fleet: Fleet
    host: Host
    state: State
    argv: Argv = server_argv
    grace_s: float = 30.0
    own_session: bool = True
    undecided_states: ClassVar[tuple[HealthState, ...]] = UNDECIDED
    """The record states whether the process runs, so a server that does not answer is "loading"."""

    def inspect(self) -> ProcessState:
        record = self.state.recorded(self.host.name)
        if record is None or not record.runs:
            return ProcessState()
        changed = record.config != config_digest(self.fleet, self.host)
        return ProcessState(record.pid, f"runs with an earlier {self.fleet.path.name}" if changed else "")

    def running(self) -> bool:
        """An error is a damaged record, whose process may run, and a server of this host that a copy of
        hosts.toml has started."""
        if self.inspect().pid is not None:
            return True
        other = started_elsewhere(self.state, self.host)
        if other is not None and other.host == self.host.name:
            raise FleetError(f"{self.host.name} runs: {other.hosts_file} has started it", other.stop_command)
        return False

    def start(self) -> None:
        host = self.host
        for port in filter(None, (host.port, host.kv_port)):
            if local.port_taken(host.address, port):
                raise self._in_use(port)
        argv, environment = self.argv(self.fleet, host)
        token_file = str(self.state.tokens.path.resolve())
        log = self.state.log_file(host.name)
        environment = {**environment, TOKEN_FILE_VARIABLE: token_file, LOG_FILE_VARIABLE: str(log.resolve())}
        pid = local.spawn(argv, log, environment, own_session=self.own_session)
        identity = local.identity(pid) or "ended at once"
        try:
            self.state.record(ProcessRecord(host.name, pid, identity, config_digest(self.fleet, host)))
        except BaseException:  # also an interruption: a server without a record could never be stopped
            local.end(pid, identity, self.grace_s)
            raise

    def _in_use(self, port: int) -> PortInUse:
        host = self.host
        message = f"{host.name}: port {port} on {host.address} is in use by {local.port_holder(port)}"
        if other := started_elsewhere(self.state, host, port):
            return PortInUse(f"{message}, which {other.hosts_file} has started as {other.host}", other.stop_command)
        return PortInUse(message, f"stop that process, or give {host.name} another port in {self.fleet.path}")

    def ended(self) -> StartFailed | None:
        if self.inspect().pid is not None:
            return None
        self.state.drop_record(self.host.name)
        return start_failed(self.host.name, self.last_lines())

    def stop(self) -> bool:
        return end_recorded(self.state, self.host.name, self.grace_s)

    def last_lines(self) -> list[str]:
        return self.state.log_tail(self.host.name, LAST_LINES)


def end_recorded(state: State, name: str, grace_s: float) -> bool:
    """End the process last started for a host, even if hosts.toml no longer has the host. True if it was killed."""
    record = state.recorded(name)
    killed = record is not None and local.end(record.pid, record.identity, grace_s)
    state.drop_record(name)
    return killed


def config_digest(fleet: Fleet, host: Host) -> str:
    """16 hexadecimal digits: a hash of what hosts.toml has about this host and its model; for a gateway, about all. The
    list of a host with several models does not count, which its keeper reads again."""
    if host.keeping is not None:
        return served_digest(fleet, host)
    known = (fleet.models, fleet.hosts) if host.gateway else fleet.models.get(host.model)
    return hashlib.sha256(repr((host, known)).encode()).hexdigest()[:16]
