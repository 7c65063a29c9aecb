"""Carry a rollout out: deploy everywhere, then turn by turn what the policy decides, until nothing is left to do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, LockLost, UsageError
from disagg.fleet.changes.hooks import Change, ChangeKind, HookRunner, around
from disagg.fleet.changes.locks import FleetLocks, kept, places
from disagg.fleet.deploy.deployment import Deployment, DeployResult, Planner
from disagg.fleet.deploy.plan import refused
from disagg.fleet.deploy.rollback import rollback
from disagg.fleet.deploy.steps import OnStep, Plan, Refusal, ignore
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.lifecycle.fleet_servers import FleetServers
from disagg.fleet.lifecycle.one_server import OnProgress, ServerResult
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.ask import poll_host
from disagg.fleet.machine import interruption
from disagg.fleet.machine.connect import Connect, Machines, machine_for
from disagg.fleet.machine.fan_out import each
from disagg.fleet.rollout import policy
from disagg.fleet.rollout.gate import Ask, Gate, with_answers
from disagg.fleet.rollout.policy import HostState, Phase, Turn
from disagg.fleet.rollout.progress import Progress, RecordFile, RolloutRecord, RolloutReport

WHY: Final = "rollout"
SETTLE_S: Final = 30.0
"""How long a host that is down may keep the others waiting before the rollout stops."""


@dataclass(slots=True)
class Rollout:
    """One rollout on some deployed hosts of a fleet. planner: towards the new releases. max_unavailable: how
    many hosts of the fleet may be down at the same time. timeout_s: until a restarted
    server must be healthy. new_answers: the new release may answer otherwise; the first of its hosts of each kind is
    compared with nothing, and the others with it. servers: starts and stops what runs. hooks: None runs none."""

    fleet: Fleet
    state: State
    hosts: Sequence[Host]
    planner: Planner
    ask: Ask
    max_unavailable: int = 1
    timeout_s: float = 300.0
    new_answers: bool = False
    break_lock: bool = False
    report: OnProgress = lambda host, doing: None
    on_step: OnStep = ignore
    connect: Connect = machine_for
    settle_s: float = SETTLE_S
    hooks: HookRunner | None = None
    _locks: FleetLocks | None = None
    _facts: dict[str, HostFacts] = field(default_factory=dict)
    _progress: Progress = field(init=False)

    def __post_init__(self) -> None:
        self._progress = Progress(RecordFile(self.state.folder / "rollout.json"))

    def _earlier(self) -> RolloutRecord:
        """The record of an unfinished rollout, without hosts that hosts.toml no longer has."""
        record = self._progress.file.read()
        return record.without(record.target.keys() - self.fleet.hosts.keys())

    @property
    def interrupted(self) -> RolloutRecord | None:
        """The record of an unfinished rollout of this fleet, if there is one."""
        record = self._earlier()
        return record if record.target else None

    def plan(self) -> list[DeployResult]:
        """Each host's plan. Changes nothing. UsageError if an unfinished rollout has other releases or more hosts, or
        if hosts can only be restarted together."""
        if nodes := [host.name for host in self.hosts if host.engine.nnodes > 1]:
            message = f"{', '.join(nodes)} compute together with other hosts, and start only together"
            raise UsageError(message, "disagg deploy && disagg restart, and roll the others out")
        with self._deployment(self.planner) as deployment:
            planned = deployment.plan()
        target = _target(planned)
        if all(one.ok for one in planned) and not self._earlier().continued_by(target):
            raise UsageError(
                "a rollout of other releases, or of more hosts, is not finished",
                "disagg rollout --undo returns its hosts to the releases from before; then repeat this one",
            )
        if plain := [one.host for one in planned if one.plan is not None and one.plan.at_once]:
            raise UsageError(
                f"{', '.join(plain)} runs a disagg from before TLS: it and a host of the new release would hand "
                "nothing over to each other",
                "disagg deploy && disagg restart --all-at-once",
            )
        return planned

    def run(self) -> RolloutReport:
        """Carry out what is planned now, under the locks of all its hosts. Raises why a host has no plan, and
        HostLocked if another command changes one; then nothing was changed."""
        with self._alone():
            planned = self.plan()
            for one in planned:
                if one.error is not None:
                    raise one.error
            self._begin(_target(planned))
            if not any(one.result == "planned" or self._progress.phases[one.host] != "outside" for one in planned):
                return self._progress.end("")
            if any(one in policy.UNDOING for one in self._progress.phases.values()):
                return self._in_turns(undo=True)
            if not self.new_answers:
                self._record_answers()
            if not self._deploy(planned):  # its hooks have run, and none may stop what follows
                return self._progress.end(self._turns(undo=True))
            return self._in_turns(undo=False)

    def undo(self) -> RolloutReport:
        """Return the hosts of an unfinished rollout to their releases from before. UsageError if there is none."""
        record = self.interrupted
        if record is None:
            raise UsageError("no rollout of this fleet is unfinished", "disagg rollback goes back one release")
        self.hosts = [host for host in self.hosts if host.name in {*record.target, *record.current}]
        if not self.hosts:
            raise UsageError(f"the unfinished rollout is of {', '.join(record.target)}", "disagg rollout --undo")
        otherwise = "disagg rollout --undo --exclude {} goes back on the others"
        with self._alone(otherwise):
            with self._deployment(lambda host, facts: Plan(host.name, facts.current)) as deployment:
                for one in deployment.plan():
                    if one.error is not None:
                        raise _hinted(one.error, otherwise.format(one.host))
            self._begin(record.target)
            return self._in_turns(undo=True)

    # The beginning

    @contextmanager
    def _alone(self, otherwise: str = "") -> Iterator[None]:
        """Within, no other command changes these hosts. Raises why one is not reached; otherwise: what its error's hint
        names beside."""
        with self.state.locked(WHY), Machines(self.connect) as machines:
            self._locks = FleetLocks(machines, WHY, self.break_lock)
            with kept(self._locks, places(self.hosts, make=True)) as unreleased:
                for name, error in self._locks.left_out.items():
                    raise _hinted(error, otherwise.format(name))
                yield
            self._locks = None
            for name, lost in unreleased.items():
                self.report(name, lost.message)

    def _around(self, kind: ChangeKind, releases: Mapping[str, str]) -> AbstractContextManager[Change]:
        """The hooks around a change. releases: of the hosts, if known."""
        changing = self._progress.changing
        known = {name: releases[name] for name in changing if releases.get(name)}
        return around(self.hooks, kind, changing, known, self._locks)

    def _deployment(self, planner: Planner, hosts: Sequence[Host] | None = None) -> Deployment:
        def decide(host: Host, facts: HostFacts) -> Plan:
            self._facts[host.name] = facts
            return planner(host, facts)

        chosen = self.hosts if hosts is None else hosts
        return Deployment(chosen, decide, WHY, self.on_step, self.connect, locks=self._locks)

    def _begin(self, target: Mapping[str, str]) -> None:
        self._progress.begin(self._earlier(), [self._facts[host.name] for host in self.hosts], target)

    def _record_answers(self) -> None:
        """What the first host of each kind answers before anything is changed."""
        for host in self.hosts:
            needed = [one for one in with_answers(self.fleet, host) if self._gate.needs(one)]
            if self._progress.phases[host.name] == "before" and needed and self._healthy(host):
                self.report(host.name, "recording its answer")
                for one in needed:
                    self._gate.record(one)

    def _deploy(self, planned: Sequence[DeployResult]) -> bool:
        """Bring the new release to every host; nothing is restarted. False if it failed anywhere."""
        progress, target = self._progress, _target(planned)
        hooks = self._around("deploy", progress.record.target)
        with hooks as change, self._deployment(self.planner) as deployment:
            progress.file.write(progress.record)  # until here nothing was changed
            done = deployment.carry_out(planned, sure=True)
            change.end({one.host: one.error for one in done if one.error is not None})
        progress.pending |= {one.host for one in done if progress.record.current[one.host] != target.get(one.host)}
        progress.errors |= {one.host: one.error for one in done if one.error is not None}
        self._stop_if_lost(done)
        return all(one.ok for one in done)

    # The turns

    def _in_turns(self, undo: bool) -> RolloutReport:
        releases = self._progress.record.before if undo else self._progress.record.target
        with self._around("restart", releases) as change:
            report = self._progress.end(self._turns(undo))
            change.end(self._progress.errors, report.exit_code == 0)
        return report

    def _turns(self, undo: bool) -> str:
        """Carry out turns until none is left. Why the rollout is blocked, "" if it is not."""
        waiting_since: float | None = None
        while True:
            turn = policy.next_turn(self._states(), self.max_unavailable, undo)
            if turn.hosts:
                waiting_since = None
                self._carry_out(turn)
                self._progress.keep()
                continue
            if not turn.blocked:
                return ""
            waiting_since = waiting_since or time.monotonic()
            if time.monotonic() - waiting_since > self.settle_s:
                return turn.blocked
            interruption.sleep(0.5)

    def _states(self) -> list[HostState]:
        """All hosts that disagg manages: those outside count for what may be down."""
        hosts = self.fleet.select(managed=True)
        healthy = {one.host.name: bool(one.value) for one in each(hosts, self._healthy)}
        return [
            HostState(
                host.name,
                frozenset((model, role) for model in host.all_models or ("",) for role in host.roles),
                self._progress.phases.get(host.name, "outside"),
                healthy[host.name],
                host.name in self._progress.pending,
            )
            for host in hosts
        ]

    def _healthy(self, host: Host) -> bool:
        return poll_host(host, self.state.tokens.current, self.state).ok

    def _carry_out(self, turn: Turn) -> None:
        hosts = [self.fleet.hosts[name] for name in turn.hosts]
        if turn.action == "test":
            self._test(hosts)
        elif turn.action == "restart":
            self._restart(hosts, "new", "failed")
        elif turn.action == "forget":
            self._switch(hosts, self._progress.record.current, "before")
        elif returned := self._switch(hosts, self._progress.record.before, "stuck"):
            self._restart(returned, "back", "stuck")
            found = [host for host in returned if self._differs(host.name)]
            self._switch(found, self._progress.record.current, "stuck")

    def _differs(self, name: str) -> bool:
        """Whether another release was current on a host before the rollout than the one that ran."""
        return self._progress.record.current.get(name, "") not in ("", self._progress.record.before[name])

    def _restart(self, hosts: Sequence[Host], up: Phase, down: Phase) -> None:
        servers = FleetServers(self.fleet, self.state, report=self.report, locks=self._locks)
        names = [host.name for host in hosts]
        self._progress.pending -= set(names)
        results = servers.restart(names, self.timeout_s, at_once=True)
        for result in results:
            if not isinstance(result.error, LockLost):
                self._settle(result.host, up if result.ok else down, result.error)
        self._stop_if_lost(results)

    def _test(self, hosts: Sequence[Host]) -> None:
        for host in hosts:
            self.report(host.name, "testing its answer")
        for one in each(hosts, self._tested):
            error = one.value or one.error
            self._settle(one.host.name, "failed" if error is not None else "passed", error)

    def _tested(self, host: Host) -> DisaggError | None:
        """Why the host does not pass."""
        errors = (self._gate.test(one) for one in with_answers(self.fleet, host))
        return next((error for error in errors if error is not None), None)

    @property
    def _gate(self) -> Gate:
        return Gate(self.ask, self._progress.record.answers)

    def _switch(self, hosts: Sequence[Host], to: Mapping[str, str], failed: Phase) -> list[Host]:
        """Make these releases current. The hosts on which that succeeded; failed: the phase of the others."""

        def decide(host: Host, facts: HostFacts) -> Plan:
            release = to.get(host.name) or self._progress.record.before.get(host.name, "")
            if not release:
                reason = Refusal("no release was there before the rollout", f"disagg logs --host {host.name}")
                return refused(host, reason)
            return rollback(host, facts, release)

        with self._deployment(decide, hosts) as deployment:
            done = deployment.carry_out(deployment.plan(), sure=True)
        self._stop_if_lost(done)
        self._progress.pending -= {one.host for one in done}
        for one in done:
            if one.error is not None:
                self._settle(one.host, failed, one.error)
        return [host for host, one in zip(hosts, done, strict=True) if one.ok]

    def _stop_if_lost(self, results: Sequence[DeployResult | ServerResult]) -> None:
        """Raise LockLost if another command has taken a lock from this one. What is done until then is recorded."""
        for one in results:
            if isinstance(one.error, LockLost):
                self._progress.keep()
                raise one.error

    def _settle(self, name: str, reached: Phase, error: DisaggError | None) -> None:
        self._progress.settle(name, reached, error)
        self.report(name, "healthy" if reached in ("new", "back") else reached)


def _target(planned: Sequence[DeployResult]) -> dict[str, str]:
    """The release of each plan, by host."""
    return {one.host: one.plan.release for one in planned if one.plan is not None}


def _hinted(error: DisaggError, more: str) -> DisaggError:
    """The error, with something more to do about it."""
    error.hint = "; ".join(filter(None, (error.hint, more)))
    return error
