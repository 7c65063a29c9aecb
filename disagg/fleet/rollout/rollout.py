"""Carry a rollout out: deploy everywhere, then turn by turn what the policy decides, until nothing is left to do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Final

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, FleetError, UsageError
from disagg.fleet.changes.hooks import HookRunner, around
from disagg.fleet.deploy.apply import OnStep, ignore
from disagg.fleet.deploy.deployment import Deployment, DeployResult, Planner
from disagg.fleet.deploy.plan import refused
from disagg.fleet.deploy.steps import Plan, Refusal
from disagg.fleet.deploy.undo import rollback
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.server import read_server_facts
from disagg.fleet.lifecycle.fleet_servers import FleetServers, OnProgress
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.health import poll_host
from disagg.fleet.machine import interruption
from disagg.fleet.machine.connect import Connect, machine_for
from disagg.fleet.machine.fan_out import each
from disagg.fleet.rollout import policy
from disagg.fleet.rollout.gate import Ask, Gate
from disagg.fleet.rollout.policy import Action, HostState, Phase, RolloutSettings
from disagg.fleet.rollout.record import RecordedPhase, RecordFile, RolloutRecord, phase
from disagg.fleet.rollout.report import HostReport, RolloutReport, ending, outcome

WHY: Final = "rollout"
SETTLE_S: Final = 30.0
"""How long a host that is down may keep the others waiting before the rollout stops."""
_RECORDED: Final[Mapping[Phase, RecordedPhase]] = {
    "passed": "passed",
    "failed": "failed",
    "back": "back",
    "stuck": "stuck",
}


@dataclass(slots=True)
class Rollout:
    """One rollout on some deployed hosts of a fleet. planner: towards the new releases. timeout_s: until a restarted
    server must be healthy. new_answers: the new release may answer otherwise; the first of its hosts of each kind is
    compared with nothing, and the others with it. servers: starts and stops what runs. hooks: None runs none."""

    fleet: Fleet
    state: State
    hosts: Sequence[Host]
    planner: Planner
    ask: Ask
    settings: RolloutSettings = field(default_factory=RolloutSettings)
    timeout_s: float = 300.0
    new_answers: bool = False
    break_lock: bool = False
    report: OnProgress = lambda host, doing: None
    on_step: OnStep = ignore
    connect: Connect = machine_for
    settle_s: float = SETTLE_S
    hooks: HookRunner | None = None
    _facts: dict[str, HostFacts] = field(default_factory=dict)
    _phases: dict[str, Phase] = field(default_factory=dict)
    _pending: set[str] = field(default_factory=set)
    _errors: dict[str, DisaggError] = field(default_factory=dict)
    _record: RolloutRecord = field(default_factory=lambda: RolloutRecord({}, {}))

    @property
    def _file(self) -> RecordFile:
        return RecordFile(self.state.folder / "rollout.json")

    def _earlier(self) -> RolloutRecord:
        """The record of an unfinished rollout, without hosts that hosts.toml no longer has."""
        record = self._file.read()
        return record.without(record.target.keys() - self.fleet.hosts.keys())

    @property
    def interrupted(self) -> RolloutRecord | None:
        """The record of an unfinished rollout of this fleet, if there is one."""
        record = self._earlier()
        return record if record.target else None

    def plan(self) -> list[DeployResult]:
        """Each host's plan. Changes nothing. UsageError if an unfinished rollout has other releases or more hosts."""
        if nodes := [host.name for host in self.hosts if host.engine.nnodes > 1]:
            message = f"{', '.join(nodes)} compute together with other hosts, and start only together"
            raise UsageError(message, "disagg deploy && disagg restart, and roll the others out")
        with self._deployment(self.planner) as deployment:
            planned = deployment.plan()
        target = {one.host: one.plan.release for one in planned if one.ok and one.plan is not None}
        if all(one.ok for one in planned) and not self._earlier().continued_by(target):
            raise UsageError(
                "a rollout of other releases, or of more hosts, is not finished",
                "disagg rollout --undo returns its hosts to the releases from before; then repeat this one",
            )
        return planned

    def run(self, planned: Sequence[DeployResult]) -> RolloutReport:
        """Carry out what `plan` returned. Every host must have a plan."""
        with self._alone():
            target = {one.host: one.plan.release for one in planned if one.plan is not None}
            self._begin(target)
            if all(self._phases[host.name] == "outside" for host in self.hosts):
                return self._end("")
            if any(one in policy.UNDOING for one in self._phases.values()):
                return self._in_turns(undo=True)
            if not self.new_answers:
                self._record_answers()
            if not self._deploy(planned):  # its hooks have run, and none may stop what follows
                return self._end(self._turns(undo=True))
            return self._in_turns(undo=False)

    def undo(self) -> RolloutReport:
        """Return the hosts of an unfinished rollout to their releases from before. UsageError if there is none."""
        with self._alone():
            record = self.interrupted
            if record is None:
                raise UsageError("no rollout of this fleet is unfinished", "disagg rollback goes back one release")
            self.hosts = [host for host in self.hosts if host.name in record.target]
            if not self.hosts:
                raise UsageError(f"the unfinished rollout is of {', '.join(record.target)}", "disagg rollout --undo")
            with self._deployment(lambda host, facts: Plan(host.name, facts.current)) as deployment:
                for one in deployment.plan():
                    if (error := one.error) is not None:
                        others = f"disagg rollout --undo --exclude {one.host} goes back on the others"
                        error.hint = f"{error.hint}; {others}" if error.hint else others
                        raise error
            self._begin(record.target)
            return self._in_turns(undo=True)

    # The beginning

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self.state.locked(WHY, name="rollout.lock"):
            yield

    @property
    def _changing(self) -> list[str]:
        """The hosts that this command changes."""
        return [host.name for host in self.hosts if self._phases[host.name] != "outside"]

    def _of_changing(self, releases: Mapping[str, str]) -> dict[str, str]:
        """Their releases, if known."""
        return {name: releases[name] for name in self._changing if releases.get(name)}

    def _deployment(self, planner: Planner, hosts: Sequence[Host] | None = None) -> Deployment:
        def decide(host: Host, facts: HostFacts) -> Plan:
            self._facts[host.name] = facts
            return planner(host, facts)

        chosen = self.hosts if hosts is None else hosts
        return Deployment(chosen, decide, WHY, self.on_step, self.connect)

    def _begin(self, target: Mapping[str, str]) -> None:
        """The phase of each host, by its links and the record."""
        earlier = self._earlier()
        self._record = earlier.without({host.name for host in self.hosts})
        self._record.verdicts |= earlier.verdicts
        for host in self.hosts:
            name, facts = host.name, self._facts[host.name]
            alive = facts.serving is not None and facts.serving.alive
            runs, known = facts.ran if alive else "", name in earlier.target
            if runs == target[name] and not known:
                self._phases[name] = "outside"
                continue
            before = earlier.before.get(name, "") if known else facts.ran
            self._record.target[name], self._record.before[name] = target[name], before
            self._phases[name] = phase(target[name], before, runs, earlier.verdicts.get(name))
            if facts.current == target[name] != runs:
                self._pending.add(name)

    def _record_answers(self) -> None:
        """What the first host of each kind answers before anything is changed."""
        for host in self.hosts:
            if self._phases[host.name] == "before" and self._gate.needs(host) and self._healthy(host):
                self.report(host.name, "recording its answer")
                self._gate.record(host)

    def _deploy(self, planned: Sequence[DeployResult]) -> bool:
        """Bring the new release to every host; nothing is restarted. False if it failed anywhere."""
        hooks = around(self.hooks, "deploy", self._changing, self._of_changing(self._record.target))
        with hooks as change, self._deployment(self.planner) as deployment:
            self._file.write(self._record)  # until here nothing was changed
            deployment.plan()
            done = deployment.carry_out(planned, self.break_lock)
            change.end({one.host: one.error for one in done if one.error is not None})
        self._pending |= {one.host for one in done if self._phases[one.host] == "before"}
        self._errors |= {one.host: one.error for one in done if one.error is not None}
        return all(one.ok for one in done)

    # The turns

    def _in_turns(self, undo: bool) -> RolloutReport:
        releases = self._record.before if undo else self._record.target
        with around(self.hooks, "restart", self._changing, self._of_changing(releases)) as change:
            report = self._end(self._turns(undo))
            change.end(self._errors, report.exit_code == 0)
        return report

    def _turns(self, undo: bool) -> str:
        """Carry out turns until none is left. Why the rollout is blocked, "" if it is not."""
        waiting_since: float | None = None
        while True:
            turn = policy.next_turn(self._states(), self.settings, undo)
            if turn.steps:
                waiting_since = None
                self._carry_out(turn.steps[0][1], [self.fleet.hosts[name] for name, _ in turn.steps])
                self._keep()
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
                frozenset((host.model, role) for role in host.roles),
                self._phases.get(host.name, "outside"),
                healthy[host.name],
                host.name in self._pending,
            )
            for host in hosts
        ]

    def _healthy(self, host: Host) -> bool:
        return poll_host(host, self.state.token(), self.state).ok

    def _carry_out(self, action: Action, hosts: Sequence[Host]) -> None:
        if action == "test":
            self._test(hosts)
        elif action == "restart":
            self._require_current(hosts)
            self._restart(hosts, "new", "failed")
        elif action == "forget":
            self._switch_back(hosts, "before")
        elif returned := self._switch_back(hosts, "stuck"):
            self._restart(returned, "back", "stuck")

    def _require_current(self, hosts: Sequence[Host]) -> None:
        """FleetError if another command has deployed something else meanwhile."""

        def current(host: Host) -> str:
            with closing(self.connect(host)) as machine:
                return read_server_facts(machine, host.name, None).current

        for found in each(hosts, current):
            name = found.host.name
            if found.value is not None and found.value != self._record.target[name]:
                raise FleetError(
                    f"{name}: another command has made release {found.value[:8]} current there",
                    "disagg rollout --undo returns the hosts of this rollout",
                )

    def _restart(self, hosts: Sequence[Host], up: Phase, down: Phase) -> None:
        servers = FleetServers(
            self.fleet, self.state, report=self.report, connect=self.connect, break_lock=self.break_lock
        )
        names = [host.name for host in hosts]
        self._pending -= set(names)
        for result in servers.restart(names, self.timeout_s, at_once=True):
            self._settle(result.host, up if result.ok else down, result.error)

    def _test(self, hosts: Sequence[Host]) -> None:
        for host in hosts:
            self.report(host.name, "testing its answer")
        for tested in each(hosts, self._gate.test):
            error = tested.value or tested.error
            self._settle(tested.host.name, "failed" if error is not None else "passed", error)

    @property
    def _gate(self) -> Gate:
        return Gate(self.ask, self._record.answers)

    def _switch_back(self, hosts: Sequence[Host], failed: Phase) -> list[Host]:
        """Make the releases from before current again. The hosts on which that succeeded."""

        def decide(host: Host, facts: HostFacts) -> Plan:
            before = self._record.before[host.name]
            if not before:
                return refused(
                    host, Refusal("no release ran there before the rollout", f"disagg logs --host {host.name}")
                )
            return rollback(host, facts, before)

        with self._deployment(decide, hosts) as deployment:
            done = deployment.carry_out(deployment.plan(), self.break_lock)
        self._pending -= {one.host for one in done}
        for one in done:
            if one.error is not None:
                self._settle(one.host, failed, one.error)
        return [host for host, one in zip(hosts, done, strict=True) if one.ok]

    def _settle(self, name: str, reached: Phase, error: DisaggError | None) -> None:
        self._phases[name] = reached
        self.report(name, "healthy" if reached in ("new", "back") else reached)
        if error is not None and name not in self._errors:
            self._errors[name] = error

    # The end

    def _keep(self) -> None:
        """Write to the record what an interruption must not lose."""
        for name, reached in self._phases.items():
            if reached in _RECORDED:
                self._record.verdicts[name] = _RECORDED[reached]
            else:
                self._record.verdicts.pop(name, None)
        self._file.write(self._record)

    def _end(self, blocked: str) -> RolloutReport:
        ended = ending([self._phases[host.name] for host in self.hosts], blocked)
        if ended != "stopped":
            self._forget()
        shown = [
            HostReport(
                host.name, outcome(reached), self._shown_release(host.name, reached), self._errors.get(host.name)
            )
            for host in self.hosts
            for reached in [self._phases[host.name]]
        ]
        return RolloutReport(ended, shown, blocked)

    def _forget(self) -> None:
        """These hosts have ended it. Others, which were not selected, have not."""
        rest = self._record.without({host.name for host in self.hosts})
        if rest.target:
            self._file.write(rest)
        else:
            self._file.remove()

    def _shown_release(self, name: str, reached: Phase) -> str:
        """What runs there."""
        if reached == "outside":
            return self._facts[name].current
        return (self._record.target if reached in ("new", "passed", "failed") else self._record.before).get(name, "")
