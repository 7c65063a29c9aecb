"""Start, stop and restart the servers of a fleet, local and deployed.

All hosts are handled at the same time, and each has its own result. Starting a running server changes nothing. A
server that exits while it starts has *failed*, and is stopped; one that is still loading at the deadline is *slow*, and
is left running. A restart takes the hosts of each model one after the other (`turns`), and skips the rest of a model
after the first host that does not come back. The locks of all deployed hosts are held from before the first change to
the end, also while an interruption is cleaned up after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock

from disagg.config import Fleet, Host
from disagg.errors import ConfigError, DisaggError, FleetError, StartFailed
from disagg.extras import require
from disagg.fleet.changes.audit import audited_here
from disagg.fleet.changes.fleet_locks import FleetLocks, LockedPlace, kept, places
from disagg.fleet.changes.hooks import Change
from disagg.fleet.lifecycle.base import ProcessState, Server, ServerOutcome, ServerResult
from disagg.fleet.lifecycle.deployed import DeployedServer
from disagg.fleet.lifecycle.local import Argv, LocalServer, server_argv
from disagg.fleet.lifecycle.other_servers import other_places, stop_other_fleet, stop_other_host, stop_recorded
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import poll_host
from disagg.fleet.lifecycle.status.host_status import HostStatus
from disagg.fleet.lifecycle.turns import Row, rows
from disagg.fleet.machine import interruption
from disagg.fleet.machine.connect import Connect, Machines, machine_for
from disagg.fleet.machine.fan_out import each
from disagg.fleet.services import needs
from disagg.fleet.token.there import require_own

GRACE_S = 30.0
"""From SIGTERM to SIGKILL: longer than the 20 s in which a server finishes its requests."""

OnProgress = Callable[[str, str], None]
"""Called with (host, what it does now), from several threads."""


def _no_hooks(locks: FleetLocks | None) -> AbstractContextManager[Change]:
    return nullcontext(Change("restart", ()))


@dataclass(slots=True)
class FleetServers:
    """Starts and stops a fleet's servers. argv: builds a local server's command line. connect: reaches other hosts.
    break_lock: take over the locks of hosts that other commands hold. own_session: local servers run on after this
    program. locks: of a command that this is a part of; it holds those of all hosts, and the fleet's."""

    fleet: Fleet
    state: State
    argv: Argv = server_argv
    report: OnProgress = lambda host, doing: None
    grace_s: float = GRACE_S
    connect: Connect = machine_for
    break_lock: bool = False
    own_session: bool = True
    locks: FleetLocks | None = None
    _begun: list[Host] = field(default_factory=list)
    _down: list[Host] = field(default_factory=list)
    _guard: Lock = field(default_factory=Lock)

    def start(self, names: Sequence[str] = (), timeout_s: float = 300.0) -> list[ServerResult]:
        """Start every named host that does not run, and wait until each is healthy, failed or slow. HostLocked, with
        nothing changed, if another command changes one.

        An interruption stops what this call started.
        """
        hosts, others = self._selected(names)
        with self._changing(hosts, "start") as unreleased:
            self._prepare(hosts)
            self._begun.clear()
            try:
                results = self._all(hosts, "start", lambda server: self._start(server, timeout_s))
            except BaseException:  # also an interruption: no server stays half started
                self._undo(self._begun, "stop", self._stop)
                raise
        return [*_settled(results, unreleased), *others]

    def stop(self, names: Sequence[str] = (), everything: bool = False) -> list[ServerResult]:
        """Stop every named host; without names also local servers that hosts.toml no longer lists. HostLocked as of
        `start`.

        everything: also all other servers of disagg on the machines of these hosts. On this machine these are the
        servers of other fleets, named `HOST of FLEET`; on a deployed machine hosts that are not in hosts.toml, named
        `NAME on HOST`.
        """
        hosts, others = self._selected(names)
        other_fleets = self.state.others() if everything and any(host.server_kind.spawned for host in hosts) else []
        own = self._stop_own(hosts, names, everything) if hosts or not names else []
        return [*own, *others] + [result for state in other_fleets for result in stop_other_fleet(state, self.grace_s)]

    def _stop_own(self, hosts: Sequence[Host], names: Sequence[str], everything: bool) -> list[ServerResult]:
        if all(host.server_kind.spawned for host in hosts) and not self.state.exists():
            return self._all(hosts, "stop", self._stop)  # there is nothing to lock
        with ExitStack() as stack:
            machines = stack.enter_context(Machines(self.connect))
            more = other_places(self.fleet, hosts, machines) if everything else []
            why = "stop --all" if everything else "stop"
            unreleased = stack.enter_context(self._changing(hosts, why, more, machines, if_full=True))
            results = self._all(hosts, "stop", self._stop)
            if not names:
                removed = [name for name in self.state.recorded_hosts() if name not in self.fleet.hosts]
                results += [stop_recorded(self.state, name, name, self.grace_s) for name in removed]
            results += [stop_other_host(machines[place.machine], place) for place in more]
        return _settled(results, unreleased)

    def restart(
        self,
        names: Sequence[str] = (),
        timeout_s: float = 300.0,
        at_once: bool = False,
        within: Callable[[FleetLocks | None], AbstractContextManager[Change]] = _no_hooks,
    ) -> list[ServerResult]:
        """Stop and start every named host, one after the other within a model (at_once: all at the same time). Each has
        `timeout_s` to become healthy. Hosts that do not run are started. HostLocked as of `start`. within: made
        with the locks and entered under them, and told how it ended.

        An interruption starts what this call has stopped, without waiting for it to be healthy.
        """
        hosts, others = self._selected(names)
        leaders = {row[0][0].name: row for row in rows(hosts, at_once)}
        with self._changing(hosts, "restart") as unreleased, within(self.locks) as change:
            self._prepare(hosts)
            self._down.clear()
            try:
                outcomes = each(
                    [row[0][0] for row in leaders.values()],
                    lambda host: self._restart_in_turn(leaders[host.name], timeout_s),
                )
            except BaseException:  # also an interruption: a host that served must not stay without its server
                self._undo(self._down, "restart", self._bring_back)
                raise
            done = {result.host: result for outcome in outcomes for result in outcome.value or ()}
            results = [done[host.name] for host in hosts] + others
            errors = {one.host: one.error for one in results if one.error is not None}
            change.end(errors, all(one.ok for one in results))
        return _settled(results, unreleased)

    @contextmanager
    def _changing(
        self,
        hosts: Sequence[Host],
        why: str,
        more: Sequence[LockedPlace] = (),
        machines: Machines | None = None,
        *,
        if_full: bool = False,
    ) -> Iterator[Mapping[str, DisaggError]]:
        """Within, no other command changes these hosts. Yields what has afterwards the hosts whose lock could not be
        given back, and why. more: places beside theirs. machines: the connections to use. if_full: see FleetLocks."""
        if self.locks is not None:
            yield {}
            return
        with ExitStack() as stack:
            stack.enter_context(self.state.locked(why))
            machines = machines or stack.enter_context(Machines(self.connect))
            self.locks = FleetLocks(machines, why, self.break_lock, if_full)
            stack.callback(setattr, self, "locks", None)
            wanted = [*places([host for host in hosts if host.server_kind.deployed]), *more]
            yield stack.enter_context(kept(self.locks, wanted))

    def _selected(self, names: Sequence[str]) -> tuple[list[Host], list[ServerResult]]:
        """The named hosts that disagg manages, and the results for the others."""
        chosen = self.fleet.select(names)
        others = [ServerResult(host.name, "not managed") for host in chosen if host.whole]
        return [host for host in chosen if not host.whole], others

    def _undo(self, hosts: Sequence[Host], why: str, action: Callable[[Server], ServerResult]) -> None:
        """Clean up after an interruption. The command then has no results, so a failure is reported as progress."""
        for result in self._all(list(hosts), why, action):
            if result.error is not None:
                self.report(result.host, f"failed: {result.error}")

    def _prepare(self, hosts: Sequence[Host]) -> None:
        """Create or check the token before any server is touched. ConfigError for one that would wait for a missing
        node."""
        for host in hosts:
            self.fleet.require_all_nodes(host)
        if spawned := [host for host in hosts if host.server_kind.spawned]:
            require(*(extra for host in spawned if host.python is None for extra in needs(host)))
            self.state.prepare(self.fleet)
        elif hosts and not self.state.tokens.exists():
            raise ConfigError(
                f"there is no fleet token in {self.state.tokens.path}",
                "disagg deploy makes one; if the hosts have one already: disagg deploy --adopt-token",
            )

    # Many hosts

    def _all(self, hosts: Sequence[Host], why: str, action: Callable[[Server], ServerResult]) -> list[ServerResult]:
        return [
            outcome.value or ServerResult(outcome.host.name, "failed", outcome.seconds, outcome.error)
            for outcome in each(hosts, lambda host: self._one(host, why, action))
        ]

    def _one(self, host: Host, why: str, action: Callable[[Server], ServerResult]) -> ServerResult:
        """The action's result on one host. A DisaggError becomes a failed result. why: the command."""
        began = time.monotonic()
        try:
            with audited_here(self.state.audit_file(host.name), why) if host.server_kind.spawned else nullcontext():
                result = action(self._server(host))
        except DisaggError as error:
            result = ServerResult(host.name, "failed", time.monotonic() - began, error)
        if result.error is not None and self.locks is not None:
            self.locks.failed(host.name, result.error)
        return result

    def _restart_in_turn(self, row: Row, timeout_s: float) -> list[ServerResult]:
        """Restart the hosts of one turn after the other, until one does not come back."""
        results: list[ServerResult] = []
        for turn in row:
            if all(result.ok for result in results):
                results += self._all(turn, "restart", lambda server: self._restart(server, timeout_s))
            else:
                results += [ServerResult(host.name, "left") for host in turn]
        return results

    def _server(self, host: Host) -> Server:
        if host.server_kind.spawned:
            return LocalServer(self.fleet, host, self.state, self.argv, self.grace_s, self.own_session)
        assert self.locks is not None, "a deployed host is changed under its lock"
        return DeployedServer(host, self.locks.machine(host))

    # One host

    def _inspected(self, server: Server) -> ProcessState:
        """The server's process. FleetError before anything is stopped or started if its token is not this machine's."""
        process = server.inspect()
        require_own(self.state.tokens.all, process.token_digests, server.host.name)
        return process

    def _start(self, server: Server, timeout_s: float) -> ServerResult:
        host, process = server.host, self._inspected(server)
        if process.stale:
            raise FleetError(f"{host.name} {process.stale}", f"disagg restart --host {host.name}")
        if process.pid is not None:
            return self._until_healthy(server, "unchanged", timeout_s)
        with self._guard:
            self._begun.append(host)
        return self._launch(server, "started", timeout_s)

    def _restart(self, server: Server, timeout_s: float) -> ServerResult:
        process = self._inspected(server)
        if process.pid is None:
            return self._launch(server, "started", timeout_s)
        with self._guard:
            self._down.append(server.host)
        self.report(server.host.name, "stopping")
        server.stop()
        try:
            result = self._launch(server, "restarted", timeout_s)
        except StartFailed as error:
            if process.earlier_release:
                error.hint = _with_rollback(error.hint, server.host)
            raise
        if process.earlier_release and result.outcome == "failed" and result.error is not None:
            result.error.hint = _with_rollback(result.error.hint, server.host)
        return result

    def _not_down(self, host: Host) -> None:
        """Remove the host from those that an interruption starts again."""
        with self._guard:
            self._down = [other for other in self._down if other != host]

    def _bring_back(self, server: Server) -> ServerResult:
        self.report(server.host.name, "starting again")
        server.stop()  # the interruption may have come while it was stopping
        server.start()
        return ServerResult(server.host.name, "restarted")

    def _launch(self, server: Server, outcome: ServerOutcome, timeout_s: float) -> ServerResult:
        self.report(server.host.name, "starting")
        try:
            server.start()
            self._not_down(server.host)
            result = self._until_healthy(server, outcome, timeout_s)
        except StartFailed:
            self._not_down(server.host)
            server.stop()  # its service manager would restart it forever
            raise
        if result.outcome == "failed":
            server.stop()
        return result

    def _until_healthy(self, server: Server, outcome: ServerOutcome, timeout_s: float) -> ServerResult:
        began = time.monotonic()
        status = self._await_health(server, began + timeout_s)
        host, seconds = server.host, time.monotonic() - began
        if status.state == "healthy":
            return ServerResult(host.name, outcome, seconds)
        if status.state in server.undecided_states:
            return ServerResult(host.name, "slow", seconds, _slow(host, status, seconds))
        error = StartFailed(f"{host.name}: {status.why}", status.hint)
        error.log = tuple(server.last_lines())
        return ServerResult(host.name, "failed", seconds, error)

    def _await_health(self, server: Server, deadline: float) -> HostStatus:
        """Poll until the server is healthy or has failed; at the deadline, its last status."""
        token, pause, host = self.state.tokens.current, 0.05, server.host
        while True:
            status = poll_host(host, token, self.state)
            if (error := server.ended()) is not None:
                raise error
            # A server that is importing a framework may not answer or listen for seconds: it is loading.
            undecided = status.state in server.undecided_states
            self.report(host.name, "loading" if undecided else status.state)
            if not undecided or time.monotonic() > deadline:
                return status
            interruption.sleep(pause)
            pause = min(0.5, pause * 1.5)

    def _stop(self, server: Server) -> ServerResult:
        began = time.monotonic()
        running = server.running()
        if running is None:
            return ServerResult(server.host.name, "not running")
        if running:
            self.report(server.host.name, "stopping")
        killed = server.stop()
        outcome: ServerOutcome = "killed" if killed else "stopped" if running else "not running"
        return ServerResult(server.host.name, outcome, time.monotonic() - began if running else 0.0)


def _settled(results: Sequence[ServerResult], unreleased: Mapping[str, DisaggError]) -> list[ServerResult]:
    """The results, now that the locks are given back: failed where they could not be."""
    return [
        replace(one, outcome="failed", error=unreleased[one.host]) if one.host in unreleased else one for one in results
    ]


def _with_rollback(hint: str, host: Host) -> str:
    """The hint, with the way back to the release that served before."""
    return f"{hint}; or go back: disagg rollback --host {host.name} && disagg start --host {host.name}"


def _slow(host: Host, status: HostStatus, seconds: float) -> FleetError:
    hint = f"disagg status --watch, or disagg logs -f --host {host.name}"
    if status.state == "unreachable":
        message = f"{host.name} runs, but cannot be reached from here: {status.why}; it was left running"
        return FleetError(message, status.hint)
    return FleetError(f"{host.name} is still loading after {seconds:.0f} s; it was left running", hint)
