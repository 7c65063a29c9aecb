"""Remove hosts from their machines: those that are named (`uninstall`), or what no host of hosts.toml needs any more
(`Pruning`, for `disagg uninstall --unused`).

A host's server ends before its files go. All machines are handled at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

from disagg.config import Fleet, Host, ServiceManager
from disagg.errors import DisaggError
from disagg.fleet.changes.locks import FleetLocks, LockedPlace, kept
from disagg.fleet.deploy.steps import OnStep, Plan, Step, apply, ignore
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.facts.probe import kib
from disagg.fleet.facts.server import FoundHost, MachineContents, read_contents
from disagg.fleet.machine.connect import Machines
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.machine import Machine, script
from disagg.fleet.removal.leftovers import Leftovers, Orphan, leftovers, scope_of
from disagg.fleet.services import VERB_S, command
from disagg.fleet.services.base import RunScript

WHY: Final = "uninstall --unused"
_SIZES_S: Final = 300.0
_REMOVE_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Pruned:
    """What is left over on one machine, or was removed. host: through which it was reached. hosts: those of the fleet
    on it. removed: whether the orphans are gone. error: why the machine could not be read, or what could not be
    removed."""

    host: Host
    hosts: tuple[str, ...]
    orphans: tuple[Orphan, ...] = ()
    notes: tuple[str, ...] = ()
    removed: bool = False
    error: DisaggError | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host.name,
            "hosts": list(self.hosts),
            "orphans": [one.to_json() for one in self.orphans],
            "notes": list(self.notes),
            "removed": self.removed,
            "error": self.error.to_json() if self.error else None,
        }


@dataclass(slots=True)
class Pruning:
    """One removal of what is left over on the machines of some deployed hosts. token_digests: of this machine's tokens.
    others: also hosts of other fleets and with another token. cached: also models of the hub's cache."""

    fleet: Fleet
    hosts: Sequence[Host]
    machines: Machines
    token_digests: frozenset[str] = frozenset()
    others: bool = False
    cached: bool = False
    break_lock: bool = False
    report: OnStep = ignore
    _places: dict[str, str] = field(default_factory=dict)

    def find(self) -> list[Pruned]:
        """What is left over, by machine. Hosts that share a machine have one result. Changes nothing."""
        read = each(self.hosts, lambda host: read_contents(self.machines[host]))
        contents = {one.host.name: one.value for one in read if one.value is not None}
        self._places = {name: one.machine for name, one in contents.items()}
        first = {place: name for name, place in reversed(self._places.items())}
        measured = each(
            [host for host in self.hosts if host.name in first.values()],
            lambda host: self._measured(host, contents[host.name]),
        )
        found = {one.host.name: one.value or Pruned(one.host, (), error=one.error) for one in measured}
        lost = {one.host.name: Pruned(one.host, (one.host.name,), error=one.error) for one in read if one.error}
        return [(found | lost)[host.name] for host in self.hosts if host.name in found or host.name in lost]

    def carry_out(self, found: Sequence[Pruned]) -> list[Pruned]:
        """Remove what was found, under the locks of all hosts that go and of those of the fleet on their machines.
        HostLocked if another command holds one. Results without orphans stay as they are."""
        chosen = {one.host.name: one for one in found if one.orphans}
        hosts = [one.host for one in found if one.orphans]
        locks = FleetLocks(self.machines, WHY, self.break_lock, if_full=True)
        wanted = {host.name: _places(chosen[host.name]) for host in hosts}

        def prune(host: Host) -> Pruned:
            return self._prune(locks.machine(host), chosen[host.name], [place.name for place in wanted[host.name]])

        with kept(locks, [place for places in wanted.values() for place in places]) as unreleased:
            outcomes = each(hosts, prune)
            for one in outcomes:
                if one.error is not None:
                    for place in wanted[one.host.name]:
                        locks.failed(place.name, one.error)
        done = {one.host.name: one.value or replace(chosen[one.host.name], error=one.error) for one in outcomes}
        done |= {name: replace(done[name], error=error) for name, error in unreleased.items()}
        return [done.get(one.host.name, one) for one in found]

    def _measured(self, host: Host, there: MachineContents) -> Pruned:
        left = self._leftovers(host, there)
        return Pruned(host, self._together(host), tuple(_sized(self.machines[host], left.orphans)), left.notes)

    def _leftovers(self, host: Host, there: MachineContents, locked: frozenset[str] = frozenset()) -> Leftovers:
        elsewhere = frozenset(name for name, place in self._places.items() if place != self._places[host.name])
        scope = scope_of(self.fleet, elsewhere, self.token_digests, self.others, self.cached)
        return leftovers(replace(scope, locked=locked), there)

    def _together(self, host: Host) -> tuple[str, ...]:
        """The hosts on the machine of this one."""
        place = self._places[host.name]
        return tuple(one.name for one in self.hosts if self._places.get(one.name) == place)

    def _prune(self, machine: Machine, shown: Pruned, names: Sequence[str]) -> Pruned:
        """Remove what was shown and is still left over now that all locks are kept, which other commands need to use
        it. names: of the hosts whose locks these are."""
        there = read_contents(machine)
        left = self._leftovers(shown.host, there, frozenset(names))
        still = {one.path for one in left.orphans}
        orphans = tuple(one for one in shown.orphans if one.path in still)
        stay = [name for name in names if name not in {one.name for one in orphans if one.kind == "host"}]
        steps = tuple(step for one in orphans for step in _steps(one, left.hosts, there.home, stay))
        apply(machine, Plan(shown.host.name, "", steps), self.report)
        return replace(shown, orphans=orphans, removed=True)


def _places(shown: Pruned) -> list[LockedPlace]:
    """The hosts to lock on a machine: those that go, and those of the fleet."""
    going = {one.name for one in shown.orphans if one.kind == "host"}
    return [LockedPlace(shown.host, name, may_go=name in going) for name in sorted({*shown.hosts, *going})]


def _sized(machine: Machine, orphans: Sequence[Orphan]) -> Iterator[Orphan]:
    """The orphans with their sizes."""
    if not orphans:
        return
    result = machine.run([one.path for one in orphans], script=script("sizes.sh"), timeout=_SIZES_S)
    sizes = [kib(line) for line in result.stdout.splitlines()]
    for index, one in enumerate(orphans):
        yield replace(one, nbytes=sizes[index] if index < len(sizes) else None)


def _steps(orphan: Orphan, found: dict[str, FoundHost], home: str, kept: Sequence[str]) -> Iterator[Step]:
    """The steps that remove an orphan. kept: hosts that stay, and whose locks this command holds."""
    if orphan.kind == "host":
        one = found[orphan.name]
        yield from _end(HostPaths(home, one.name), one.managers, one.pid)
    paths, what = HostPaths(home, ""), f"remove {orphan.path}"
    if orphan.kind == "host" or not orphan.path.startswith(f"{paths.root}/"):
        yield Step("remove", what, RunScript(script("tidy.sh"), (orphan.path,), _REMOVE_S))
        return
    action = RunScript(script("remove_shared.sh"), (orphan.path, paths.hosts, *kept), _REMOVE_S)
    yield Step("remove", what, action, "run disagg uninstall --unused again when that command has ended")


def uninstall(host: Host, facts: HostFacts, models: bool) -> Plan:
    """Remove everything of this host from its machine; models only if `models`, and if no command changes another host
    of the machine, which may need them."""
    notes: tuple[str, ...] = ()
    if models and facts.others_deploy:
        cause = f"models stay: a command changes another host of {facts.host}'s machine and may need them"
        models, notes = False, (f"{cause}; afterwards: disagg uninstall --models --host {facts.host}",)
    installed = {name.partition(":")[0] for name in facts.installed}  # also by a manager of an earlier hosts.toml
    pid = facts.pid
    steps = [*_end(facts.paths, [one for one in get_args(ServiceManager) if one in installed], pid)]
    if facts.folder or (models and facts.carried):
        kept = {release.environment for release in facts.releases if release.host != host.name}
        free = [] if facts.others_deploy else [name for name in facts.environments if name not in kept]
        argv = (facts.paths.root, host.name, "1" if models else "0", *map(facts.paths.environment, free))
        what = f"remove {facts.paths.folder} and its environments" + (", and the models" if models else "")
        steps.append(Step("remove", what, RunScript(script("uninstall.sh"), argv, _REMOVE_S)))
    return Plan(host.name, "", tuple(steps), notes=notes)


def _end(paths: HostPaths, managers: Sequence[ServiceManager], pid: int | None) -> Iterator[Step]:
    """End the server of a host, and take it from its service managers. pid: of its process, if it runs."""
    for manager in managers:
        what = f"stop the server of {paths.host}" + (f", remove it from {manager}" if manager != "process" else "")
        hint = "a daemon belongs to root: give the account sudo without a password for as long as this takes"
        yield Step("service", what, command(manager, paths, "remove"), hint if manager == "launchd" else "")
    if pid is not None:
        action = RunScript(script("end_group.sh"), (str(pid),), VERB_S)
        yield Step("end", f"end the server of {paths.host} if it still runs", action)
