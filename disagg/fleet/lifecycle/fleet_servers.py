"""Start, stop and restart the servers of a fleet, local and deployed.

All hosts are handled at the same time, each by `OneServer`. A restart takes the hosts of each model one after the
other, and skips the rest of a model after the first host that does not come back. The locks of all deployed hosts are
kept from before the first change to the end, also while an interruption is cleaned up after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

from disagg.config import Fleet, Host
from disagg.config.addresses import same_machine
from disagg.config.tables.agree import require_all_nodes
from disagg.errors import ConfigError, DisaggError
from disagg.extras import require
from disagg.fleet.changes.audit import audited_here
from disagg.fleet.changes.hooks import Change
from disagg.fleet.changes.locks import FleetLocks, LockedPlace, kept, places
from disagg.fleet.facts.server import read_server_facts
from disagg.fleet.lifecycle.deployed import DeployedServer, hosts_there, stop_there
from disagg.fleet.lifecycle.local import Argv, LocalServer, end_recorded, server_argv
from disagg.fleet.lifecycle.one_server import OneServer, OnProgress, Server, ServerResult, attempt, stopped
from disagg.fleet.lifecycle.state import State
from disagg.fleet.machine.connect import Connect, Machines, machine_for
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.machine import Machine
from disagg.fleet.services import needs

Row = Sequence[Sequence[Host]]
"""Turns that follow each other. The hosts of one turn are restarted at the same time."""
GRACE_S = 30.0
"""From SIGTERM to SIGKILL: longer than the 20 s in which a server finishes its requests."""


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

    def start(self, names: Sequence[str] = (), timeout_s: float = 300.0) -> list[ServerResult]:
        """Start every named host that does not run, and wait until each is healthy, failed or slow. HostLocked, with
        nothing changed, if another command changes one.

        An interruption stops what this call started.
        """
        hosts, unmanaged = self._selected(names)
        one = OneServer(self.state, self.report)
        with self._changing(hosts, "start") as unreleased:
            self._prepare(hosts)
            try:
                results = self._all(hosts, "start", lambda server: one.start(server, timeout_s))
            except BaseException:  # also an interruption: no server stays half started
                self._undo(one.begun, "stop", one.stop)
                raise
        return [*_settled(results, unreleased), *unmanaged]

    def stop(self, names: Sequence[str] = (), others: bool = False) -> list[ServerResult]:
        """Stop every named host; without names also local servers that hosts.toml no longer lists. HostLocked as of
        `start`.

        others: also all other servers of disagg on the machines of these hosts. On this machine these are the
        servers of other fleets, named `HOST of FLEET`; on a deployed machine hosts that are not in hosts.toml, named
        `NAME on HOST`.
        """
        hosts, unmanaged = self._selected(names)
        other_fleets = self.state.others() if others and any(host.server_kind.spawned for host in hosts) else []
        own = self._stop_own(hosts, names, others) if hosts or not names else []
        return [*own, *unmanaged, *(one for state in other_fleets for one in _stop_other_fleet(state, self.grace_s))]

    def _stop_own(self, hosts: Sequence[Host], names: Sequence[str], others: bool) -> list[ServerResult]:
        if all(host.server_kind.spawned for host in hosts) and not self.state.exists():
            return self._all(hosts, "stop", OneServer(self.state, self.report).stop)  # there is nothing to lock
        with ExitStack() as stack:
            machines = stack.enter_context(Machines(self.connect))
            more = _other_places(self.fleet, hosts, machines) if others else []
            why = "stop --all" if others else "stop"
            unreleased = stack.enter_context(self._changing(hosts, why, more, machines, if_full=True))
            results = self._all(hosts, "stop", OneServer(self.state, self.report).stop)
            if not names:
                removed = [name for name in self.state.recorded_hosts() if name not in self.fleet.hosts]
                results += [_stop_recorded(self.state, name, name, self.grace_s) for name in removed]
            results += [_stop_other_host(machines[place.machine], place) for place in more]
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
        hosts, unmanaged = self._selected(names)
        one = OneServer(self.state, self.report)
        leaders = {row[0][0].name: row for row in rows(hosts, at_once)}
        with self._changing(hosts, "restart") as unreleased, within(self.locks) as change:
            self._prepare(hosts)
            try:
                outcomes = each(
                    [row[0][0] for row in leaders.values()],
                    lambda host: self._restart_in_turn(one, leaders[host.name], timeout_s),
                )
            except BaseException:  # also an interruption: a host that served must not stay without its server
                self._undo(one.down, "restart", one.bring_back)
                raise
            done = {result.host: result for outcome in outcomes for result in outcome.value or ()}
            results = [done[host.name] for host in hosts] + unmanaged
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
        unmanaged = [ServerResult(host.name, "not managed") for host in chosen if host.whole]
        return [host for host in chosen if not host.whole], unmanaged

    def _undo(self, hosts: Mapping[str, Host], why: str, action: Callable[[Server], ServerResult]) -> None:
        """Clean up after an interruption. The command then has no results, so a failure is reported as progress."""
        for result in self._all(list(hosts.values()), why, action):
            if result.error is not None:
                self.report(result.host, f"failed: {result.error}")

    def _prepare(self, hosts: Sequence[Host]) -> None:
        """Create or check the token before any server is touched. ConfigError for one that would wait for a missing
        node."""
        for host in hosts:
            require_all_nodes(self.fleet, host)
        if spawned := [host for host in hosts if host.server_kind.spawned]:
            require(*(extra for host in spawned if host.python is None for extra in needs(host)))
            self.state.prepare(self.fleet)
        elif hosts and not self.state.tokens.exists():
            raise ConfigError(
                f"there is no fleet token in {self.state.tokens.path}",
                "disagg deploy makes one; if the hosts have one already: disagg deploy --adopt-token",
            )

    def _all(self, hosts: Sequence[Host], why: str, action: Callable[[Server], ServerResult]) -> list[ServerResult]:
        return [
            outcome.value or ServerResult(outcome.host.name, "failed", outcome.seconds, outcome.error)
            for outcome in each(hosts, lambda host: self._attempt(host, why, action))
        ]

    def _attempt(self, host: Host, why: str, action: Callable[[Server], ServerResult]) -> ServerResult:
        """The action's result on one host. why: the command."""

        def audited() -> ServerResult:
            with audited_here(self.state.audit_file(host.name), why) if host.server_kind.spawned else nullcontext():
                return action(self._server(host))

        result = attempt(host.name, audited)
        if result.error is not None and self.locks is not None:
            self.locks.failed(host.name, result.error)
        return result

    def _restart_in_turn(self, one: OneServer, row: Row, timeout_s: float) -> list[ServerResult]:
        """Restart the hosts of one turn after the other, until one does not come back."""
        results: list[ServerResult] = []
        for turn in row:
            if all(result.ok for result in results):
                results += self._all(turn, "restart", lambda server: one.restart(server, timeout_s))
            else:
                results += [ServerResult(host.name, "left") for host in turn]
        return results

    def _server(self, host: Host) -> Server:
        if host.server_kind.spawned:
            return LocalServer(self.fleet, host, self.state, self.argv, self.grace_s, self.own_session)
        assert self.locks is not None, "a deployed host is changed under its lock"
        return DeployedServer(host, self.locks.machine(host))


def _settled(results: Sequence[ServerResult], unreleased: Mapping[str, DisaggError]) -> list[ServerResult]:
    """The results, now that the locks are given back: failed where they could not be."""
    return [
        replace(one, outcome="failed", error=unreleased[one.host]) if one.host in unreleased else one for one in results
    ]


def rows(hosts: Sequence[Host], at_once: bool) -> list[Row]:
    """A row for each model; they are taken at the same time. A host with several models is in one row with all others
    of these. The nodes of one vLLM have one turn, since each waits for the others to start. at_once: a row for each
    host."""
    if at_once:
        return [[[host]] for host in hosts]
    found: list[tuple[set[str], dict[str, list[Host]]]] = []
    for host in hosts:
        models = set(host.all_models or ("",))
        sharing = [one for one in found if one[0] & models]
        turns = {name: turn for _, row in sharing for name, turn in row.items()}
        turns.setdefault(host.engine.head_address or host.name, []).append(host)
        joined = (models.union(*(names for names, _ in sharing)), turns)
        at = min((found.index(one) for one in sharing), default=len(found))
        found = [one for one in found if one not in sharing]
        found.insert(at, joined)
    return [list(turns.values()) for _, turns in found]


def _stop_recorded(state: State, name: str, shown: str, grace_s: float) -> ServerResult:
    """Stop a local server by its record alone. shown: its name in the result."""

    def stop() -> bool:
        with audited_here(state.audit_file(name), "stop"):
            return end_recorded(state, name, grace_s)

    return attempt(shown, lambda: stopped(shown, state.running_pid(name) is not None, stop))


def _stop_other_fleet(state: State, grace_s: float) -> list[ServerResult]:
    """Stop the local servers of another fleet of this user; results of those that ran, or that failed to stop."""
    fleet = state.shown
    try:
        with state.locked("stop"):
            results = [_stop_recorded(state, name, f"{name} of {fleet}", grace_s) for name in state.recorded_hosts()]
            return [result for result in results if result.outcome != "not running"]
    except DisaggError as error:
        return [ServerResult(f"fleet {fleet}", "failed", error=error)]


def _other_places(fleet: Fleet, hosts: Sequence[Host], machines: Machines) -> list[LockedPlace]:
    """What is deployed on these hosts' machines under names that the fleet does not have. A machine that does not
    answer has a failed result of its own."""
    found = each([host for host in hosts if host.server_kind.deployed], lambda host: hosts_there(machines[host]))
    places = {
        (same_machine(one.host.address), name): LockedPlace(one.host, name)
        for one in found
        for name in one.value or ()
        if name not in fleet.hosts
    }
    return list(places.values())


def _stop_other_host(machine: Machine, place: LockedPlace) -> ServerResult:
    """Stop a server that `_other_places` found, under its lock."""
    shown = f"{place.name} on {place.machine.name}"

    def stop() -> bool:
        stop_there(machine, place.name, read_server_facts(machine, place.name, None))
        return False

    return attempt(shown, lambda: stopped(shown, True, stop))
