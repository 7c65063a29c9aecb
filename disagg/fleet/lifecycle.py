"""Start and stop the servers of hosts with connector "local".

Every host is handled at the same time and reported by itself: one host's failure hides no other. Starting what runs
already changes nothing. A server that exits while it starts has *failed*; one that still loads at the deadline is
*slow*, and is left running.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Literal

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, FleetError, PortInUse
from disagg.fleet import local
from disagg.fleet.health import HostStatus, poll_host, select_hosts
from disagg.fleet.state import ProcessRecord, State
from disagg.token import TOKEN_FILE_VARIABLE

Outcome = Literal["started", "unchanged", "slow", "failed", "stopped", "killed", "not running"]
Argv = Callable[[Fleet, Host], tuple[list[str], dict[str, str]]]
"""The command line that serves a host, and the environment it needs."""

GRACE_S = 30.0
"""From SIGTERM to SIGKILL: longer than the 20 s in which a server finishes its requests."""

_UNDECIDED = ("loading", "silent", "draining")


@dataclass(frozen=True, slots=True)
class HostResult:
    """What became of one host. `error` where the outcome is failed or slow."""

    host: str
    outcome: Outcome
    seconds: float = 0.0
    error: DisaggError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


Report = Callable[[str, str], None]
"""Told (host, what it does now) from several threads at once."""


def server_argv(fleet: Fleet, host: Host) -> tuple[list[str], dict[str, str]]:
    """The real servers: `python -m disagg.servers --config FILE --host NAME`."""
    python, environment = local.python_command(host.python)
    return [*python, "disagg.servers", "--config", str(fleet.path.resolve()), "--host", host.name], environment


def local_hosts(fleet: Fleet, names: Sequence[str] = ()) -> list[Host]:
    """The named hosts (all by default). UsageError for an unknown one, FleetError if any is reached by SSH."""
    hosts = select_hosts(fleet, names)
    elsewhere = [host.name for host in hosts if host.connector != "local"]
    if elsewhere:
        raise FleetError(
            f'this command handles hosts with connector "local"; these have connector "ssh": {", ".join(elsewhere)}',
            "on each of them: DISAGG_TOKEN_FILE=FILE python -m disagg.servers --config hosts.toml --host NAME",
        )
    return hosts


@dataclass(slots=True)
class Lifecycle:
    """Starts and stops a fleet's local servers. `argv` says how a host is served."""

    fleet: Fleet
    state: State
    argv: Argv = server_argv
    report: Report = lambda host, doing: None
    grace_s: float = GRACE_S
    _interrupted: Event = field(default_factory=Event)

    def start(self, names: Sequence[str] = (), timeout_s: float = 300.0) -> list[HostResult]:
        """Start every named host that does not run, and wait until each is healthy, failed or slow.

        An interruption stops what this call started.
        """
        hosts = local_hosts(self.fleet, names)
        with self.state.locked("start"):
            self.state.prepare(self.fleet)
            before = {host.name: self.state.recorded(host.name) for host in hosts}
            try:
                return self._all(hosts, lambda host: self._start(host, time.monotonic() + timeout_s))
            except BaseException:  # also an interruption: nothing half started stays behind
                self._all([h for h in hosts if self.state.recorded(h.name) != before[h.name]], self._stop)
                raise

    def stop(self, names: Sequence[str] = ()) -> list[HostResult]:
        """Stop every named host; without names also servers that hosts.toml no longer lists."""
        hosts = [host.name for host in local_hosts(self.fleet, names)]
        if not self.state.folder.exists():
            return [HostResult(host, "not running") for host in hosts]
        with self.state.locked("stop"):
            orphans = [] if names else [name for name in self.state.recorded_hosts() if name not in self.fleet.hosts]
            return _in_parallel([*hosts, *orphans], self._guarded(self._stop_name))

    def _all(self, hosts: Sequence[Host], action: Callable[[Host], HostResult]) -> list[HostResult]:
        by_name = {host.name: host for host in hosts}
        try:
            return _in_parallel(list(by_name), self._guarded(lambda name: action(by_name[name])), self._interrupted)
        finally:
            self._interrupted.clear()

    def _guarded(self, action: Callable[[str], HostResult]) -> Callable[[str], HostResult]:
        def act(name: str) -> HostResult:
            began = time.monotonic()
            try:
                return action(name)
            except DisaggError as error:
                return HostResult(name, "failed", time.monotonic() - began, error)

        return act

    def _start(self, host: Host, deadline: float) -> HostResult:
        began = time.monotonic()
        record = self.state.recorded(host.name)
        fresh = record is None or local.identity(record.pid) != record.identity
        if record is None or fresh:
            record = self._spawn(host)
        elif record.config != config_digest(self.fleet, host):
            raise FleetError(
                f"{host.name} runs with an earlier {self.fleet.path.name}",
                f"disagg restart --host {host.name}",
            )
        status = self._await_health(host, record, deadline)
        seconds = time.monotonic() - began
        if status.state == "healthy":
            return HostResult(host.name, "started" if fresh else "unchanged", seconds)
        if status.state in _UNDECIDED:
            return HostResult(host.name, "slow", seconds, self._slow(host, seconds))
        if fresh:
            self._stop(host)
        return HostResult(host.name, "failed", seconds, FleetError(f"{host.name}: {status.why}", status.mend))

    def _spawn(self, host: Host) -> ProcessRecord:
        for port in filter(None, (host.port, host.kv_port)):
            if local.port_taken(host.address, port):
                raise PortInUse(
                    f"{host.name}: port {port} on {host.address} is in use by {local.port_holder(port)}",
                    f"stop that process, or give {host.name} another port in {self.fleet.path}",
                )
        argv, environment = self.argv(self.fleet, host)
        self.report(host.name, "starting")
        token_file = str(self.state.token_file.resolve())
        pid = local.spawn(argv, self.state.log_file(host.name), {**environment, TOKEN_FILE_VARIABLE: token_file})
        identity = local.identity(pid) or "ended at once"
        record = ProcessRecord(host.name, pid, identity, config_digest(self.fleet, host))
        self.state.record(record)
        return record

    def _await_health(self, host: Host, record: ProcessRecord, deadline: float) -> HostStatus:
        """Poll until the server is healthy or has failed; at the deadline, how it was last seen."""
        token, pause = self.state.token(), 0.05
        while True:
            status = poll_host(host, token, self.state)
            if local.identity(record.pid) != record.identity:
                self.state.forget(host.name)
                raise failed_start(self.state, host.name)
            # A server that imports a framework may not answer for seconds: it is silent, and it is loading.
            self.report(host.name, "loading" if status.state == "silent" else status.state)
            if status.state not in _UNDECIDED or time.monotonic() > deadline or self._interrupted.is_set():
                return status
            self._interrupted.wait(pause)
            pause = min(0.5, pause * 1.5)

    def _slow(self, host: Host, seconds: float) -> FleetError:
        return FleetError(
            f"{host.name} still loads after {seconds:.0f} s; it was left running",
            f"disagg status --watch, or read {self.state.log_file(host.name)}",
        )

    def _stop(self, host: Host) -> HostResult:
        return self._stop_name(host.name)

    def _stop_name(self, name: str) -> HostResult:
        began = time.monotonic()
        record = self.state.recorded(name)
        if record is None or local.identity(record.pid) != record.identity:
            self.state.forget(name)
            return HostResult(name, "not running")
        self.report(name, "stopping")
        killed = local.end(record.pid, record.identity, self.grace_s)
        self.state.forget(name)
        return HostResult(name, "killed" if killed else "stopped", time.monotonic() - began)


def config_digest(fleet: Fleet, host: Host) -> str:
    """A short hash of all that hosts.toml says about this host and its model."""
    return hashlib.sha256(repr((host, fleet.models.get(host.model))).encode()).hexdigest()[:16]


def failed_start(state: State, name: str) -> FleetError:
    """Why a server that exited did so: its last error line if it logged one, else the end of its log."""
    log = state.log_file(name)
    tail = state.log_tail(name)
    logged = state.last_error(name)
    if logged is not None:
        return FleetError(f"{name} did not start: {logged.message}", logged.hint or f"its log: {log}")
    words = "\n".join(tail) if tail else "(it wrote nothing)"
    return FleetError(f"{name} exited while starting; the end of its log:\n{words}", f"its log: {log}")


def _in_parallel(
    names: Sequence[str], action: Callable[[str], HostResult], interrupted: Event | None = None
) -> list[HostResult]:
    """Run the action for every name at once; results in the names' order. An exception here (an interruption) sets
    `interrupted` and waits until the actions have seen it."""
    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        try:
            return list(pool.map(action, names))
        except BaseException:
            if interrupted is not None:
                interrupted.set()
            raise
