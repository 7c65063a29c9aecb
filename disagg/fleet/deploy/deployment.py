"""Deploy, roll back, uninstall: all hosts at the same time, each with its own result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from disagg.config import Fleet, Host
from disagg.errors import DeployRefused, DisaggError, UsageError, exit_code_of_all
from disagg.fleet.changes.locks import FleetLocks, LockedPlace, kept
from disagg.fleet.conditions.table import Subject, judged
from disagg.fleet.deploy import plan as planning
from disagg.fleet.deploy.compare import Difference, difference, read_content
from disagg.fleet.deploy.release import Installation, target_state
from disagg.fleet.deploy.steps import OnStep, Plan, Refusal, apply, ignore
from disagg.fleet.facts.host import HostFacts, read_host_facts
from disagg.fleet.machine.connect import Connect, Machines, machine_for
from disagg.fleet.machine.fan_out import HostOutcome, each
from disagg.fleet.machine.machine import Machine
from disagg.fleet.tokens.there import foreign_token

Planner = Callable[[Host, HostFacts], Plan]
"""Makes a host's plan from its facts."""
Comparer = Callable[[Host, HostFacts, Plan, Machine], Difference | None]
"""Compares what a host has with what its plan makes of it."""

DeployOutcome = Literal["unchanged", "changed", "planned", "failed"]


@dataclass(frozen=True, slots=True)
class DeployResult:
    """The result on one host. error: set if the result is failed. sent: bytes. plan: None if the host's facts could not
    be read. difference: of a plan that was asked for it."""

    host: str
    result: DeployOutcome
    plan: Plan | None = None
    seconds: float = 0.0
    sent: int = 0
    error: DisaggError | None = None
    difference: Difference | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "result": self.result,
            "seconds": round(self.seconds, 3),
            "bytes": self.sent,
            "error": self.error.to_json() if self.error else None,
            "plan": self.plan.to_json() if self.plan else None,
            "difference": self.difference.to_json() if self.difference else None,
        }


def choose(fleet: Fleet, names: Sequence[str] = (), **selection: Any) -> list[Host]:
    """The selected hosts that are deployed to. Those with connector "local" are served from this installation.

    selection: further arguments of Fleet.select. Raises UsageError if such a host is named, or no host is left.
    """
    hosts = fleet.select(names, **selection, managed=True)
    here = [host.name for host in hosts if not host.server_kind.deployed]
    if not set(here).isdisjoint(names) or (here and len(here) == len(hosts)):
        raise UsageError(
            f'{", ".join(here)}: connector is "local": served from this installation of disagg',
            "there is nothing to deploy or to remove: disagg start and disagg stop",
        )
    return [host for host in hosts if host.server_kind.deployed]


def planner(installation: Installation, replace_token: bool = False) -> Planner:
    """The planner of `disagg deploy`: towards the target state of this installation. replace_token: also on hosts that
    have another token, which are refused otherwise."""

    def make_plan(host: Host, facts: HostFacts) -> Plan:
        refused, noted = judged(Subject(installation.fleet, host, facts))
        reasons = [Refusal.of(one) for one in refused]
        foreign = foreign_token(installation.tokens, facts.token_digests, facts.host)
        if foreign is not None and not replace_token:
            reasons.append(Refusal(*foreign))
        wanted = target_state(installation, host, facts)
        if isinstance(wanted, Refusal):
            return planning.refused(host, *dict.fromkeys([*reasons, wanted]))
        if reasons:
            return planning.refused(host, *reasons)
        made = planning.plan(wanted, facts)
        return replace(made, notes=(*made.notes, *(": ".join(filter(None, (one.text, one.hint))) for one in noted)))

    return make_plan


def comparer(installation: Installation) -> Comparer:
    """Compares hosts with the target state of this installation: one more round trip to each that has a release."""

    def compare(host: Host, facts: HostFacts, plan: Plan, machine: Machine) -> Difference | None:
        wanted = target_state(installation, host, facts)
        if isinstance(wanted, Refusal):
            return None
        return difference(wanted, plan, facts, read_content(machine, facts))

    return compare


def exit_code(reports: Sequence[DeployResult]) -> int:
    """0 if all went well, 4 if a host cannot be reached, else 1."""
    return exit_code_of_all(report.error.exit_code for report in reports if report.error is not None)


@dataclass(slots=True)
class Deployment:
    """One command on some hosts. why: the command, for the locks. if_full: see FleetLocks. compare: for plans that
    somebody reads. locks: of a command that this one is a part of, and that holds those of all these hosts. Machines
    stay connected until it is closed."""

    hosts: Sequence[Host]
    planner: Planner
    why: str
    report: OnStep = ignore
    connect: Connect = machine_for
    if_full: bool = False
    compare: Comparer | None = None
    locks: FleetLocks | None = None
    _machines: Machines = field(init=False)
    _unreleased: dict[str, DisaggError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._machines = Machines(self.connect) if self.locks is None else self.locks.machines

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        if self.locks is None:
            self._machines.close()

    def plan(self) -> list[DeployResult]:
        """Each host's plan. Changes nothing."""

        def read(host: Host) -> DeployResult:
            facts = read_host_facts(self._machines[host], host)
            plan = self.planner(host, facts)
            if plan.refusals:
                return DeployResult(host.name, "failed", plan, error=_refused(plan))
            if not plan.steps:
                return DeployResult(host.name, "unchanged", plan)
            found = self.compare(host, facts, plan, self._machines[host]) if self.compare is not None else None
            return DeployResult(host.name, "planned", plan, difference=found)

        return [_reported(outcome) for outcome in each(self.hosts, read)]

    @contextmanager
    def locked(self, planned: Sequence[DeployResult], break_lock: bool = False) -> Iterator[None]:
        """Within, this command holds the locks of all hosts that have a plan, also of those that need nothing now.
        HostLocked if another command holds one."""
        results = {one.host: one.result for one in planned}
        wanted = [
            LockedPlace(host, host.name, make=results[host.name] == "planned")
            for host in self.hosts
            if results[host.name] in ("planned", "unchanged")
        ]
        self.locks = FleetLocks(self._machines, self.why, break_lock, self.if_full)
        try:
            with kept(self.locks, wanted) as self._unreleased:
                yield
        finally:
            self.locks = None

    def carry_out(
        self, planned: Sequence[DeployResult], break_lock: bool = False, *, sure: bool = False
    ) -> list[DeployResult]:
        """Carry out the plans, made anew under the locks, because another command may have changed a host before; not
        if they are `sure`, because they were made under them. Hosts that failed keep their result. Takes the locks if
        they are not kept already."""
        if self.locks is not None:
            return self._carry_out(planned, self.locks, sure)
        if not any(one.result == "planned" for one in planned):
            return list(planned)
        with self.locked(planned, break_lock):
            done = self.carry_out(planned)
        return self.settled(done)

    def settled(self, done: Sequence[DeployResult]) -> list[DeployResult]:
        """The results, now that the locks are given back: failed where they could not be."""
        lost = self._unreleased
        return [replace(one, result="failed", error=lost[one.host]) if one.host in lost else one for one in done]

    def _carry_out(self, planned: Sequence[DeployResult], locks: FleetLocks, sure: bool) -> list[DeployResult]:
        before = {report.host: report for report in planned}

        def change(host: Host) -> DeployResult:
            machine, lock, report = locks.machine(host), locks.lock(host), before[host.name]
            if report.result == "unchanged" and (sure or lock is None):  # without a lock: nothing is there
                return report
            plan = report.plan if sure and report.plan else self.planner(host, read_host_facts(machine, host))
            if plan.refusals:
                return DeployResult(host.name, "failed", plan, error=_refused(plan))
            sent = apply(machine, plan, self.report)
            if lock is not None:
                lock.current = plan.release
            return DeployResult(host.name, "changed" if plan.steps else "unchanged", plan, sent=sent)

        changing = [host for host in self.hosts if before[host.name].result in ("planned", "unchanged")]
        done = {outcome.host.name: _reported(outcome) for outcome in each(changing, change)}
        for name, report in done.items():
            if report.error is not None:
                locks.failed(name, report.error)
            if report.plan is None:  # it failed midway: keep its plan for the report
                done[name] = replace(report, plan=before[name].plan)
        return [done.get(host.name, before[host.name]) for host in self.hosts]


def _reported(outcome: HostOutcome[DeployResult]) -> DeployResult:
    if outcome.value is not None:
        return replace(outcome.value, seconds=outcome.seconds)
    return DeployResult(outcome.host.name, "failed", seconds=outcome.seconds, error=outcome.error)


def _refused(plan: Plan) -> DeployRefused:
    causes = "; ".join(refusal.cause for refusal in plan.refusals)
    return DeployRefused(f"{plan.host}: {causes}", "; ".join(refusal.hint for refusal in plan.refusals))
