"""The locks of all hosts that a command changes: taken before its first change, in order of names, and kept until its
end, so that no other command changes a part of them meanwhile.

One refusal gives all of them back. A host that cannot be reached, or locked, is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import NamedTuple

from disagg.config import Host
from disagg.errors import Cancelled, DisaggError, HostLocked
from disagg.fleet.changes.audit import Caller
from disagg.fleet.changes.lock import HostLock, LockFound, acquire, look
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.connect import Machines
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.interruption import interrupted_by
from disagg.fleet.machine.machine import Machine


class LockedPlace(NamedTuple):
    """A host to lock, on the machine of a host of hosts.toml: usually that one. make: make its folder if nothing was
    deployed to it; else it has no lock then. may_go: the command removes it."""

    machine: Host
    name: str
    make: bool = False
    may_go: bool = False


@dataclass(slots=True)
class FleetLocks:
    """The locks of one command. why: the command, for others. break_lock: take them from any holder. if_full: go on
    without a lock if a disk has no room for one. left_out: hosts that are not locked, by their machine's name, and why.
    """

    machines: Machines
    why: str
    break_lock: bool = False
    if_full: bool = False
    left_out: dict[str, DisaggError] = field(default_factory=dict)
    _hosts: dict[str, Host] = field(default_factory=dict)
    _kept: dict[tuple[str, str], HostLock] = field(default_factory=dict)
    _failed: dict[str, BaseException] = field(default_factory=dict)

    def take(self, places: Sequence[LockedPlace]) -> None:
        """Take them all. HostLocked, with none of them taken, if another command holds one."""
        holder = Caller.this_process(self.why)
        ordered = sorted(places, key=lambda place: (place.name, place.machine.name))
        seen = self._look(ordered)
        for place in ordered:
            if place in seen and not self.break_lock and (refusal := seen[place].refusal(place.name)) is not None:
                raise refusal
        for place in ordered:
            if place in seen and (seen[place].exists or place.make):
                self._acquire(place, holder, seen[place].home)

    def _look(self, places: Sequence[LockedPlace]) -> dict[LockedPlace, LockFound]:
        """At all of them at the same time. It connects, and mostly refuses without having taken anything."""

        def found(host: Host) -> dict[LockedPlace, LockFound]:
            return {one: look(self.machines[host], one.name) for one in places if one.machine == host}

        self._hosts |= {place.machine.name: place.machine for place in places}
        outcomes = each([self._hosts[name] for name in dict.fromkeys(place.machine.name for place in places)], found)
        self.left_out |= {one.host.name: one.error for one in outcomes if one.error is not None}
        return {place: there for one in outcomes for place, there in (one.value or {}).items()}

    def _acquire(self, place: LockedPlace, holder: Caller, home: str) -> None:
        machine, paths = self.machines[place.machine], HostPaths(home, place.name)

        def taken(host: Host) -> HostLock | None:
            return acquire(
                machine,
                paths,
                holder,
                break_lock=self.break_lock,
                if_full=self.if_full,
                may_go=place.may_go,
            )

        (outcome,) = each([place.machine], taken)
        if isinstance(outcome.error, (HostLocked, Cancelled)):
            raise outcome.error
        if outcome.error is not None:
            self.left_out[place.machine.name] = outcome.error
        elif outcome.value is not None:
            self._kept[place.machine.name, place.name] = outcome.value

    def machine(self, host: Host) -> Machine:
        """The host's machine, on which everything compares the lock first. Raises why it was left out."""
        if (error := self.left_out.get(host.name)) is not None:
            raise error
        return self.machines[host]

    def lock(self, host: Host) -> HostLock | None:
        """The host's lock; None if it is not locked."""
        return self._kept.get((host.name, host.name))

    def note(self, hosts: Sequence[Host], lines: Sequence[str]) -> None:
        """Write these lines to the audits of those of the hosts that are locked, also if this thread is interrupted."""
        by_host = {host.name: lock for host in hosts if (lock := self.lock(host)) is not None}
        with interrupted_by(Event()):
            each([host for host in hosts if host.name in by_host], lambda host: by_host[host.name].note(lines))

    def failed(self, name: str, error: BaseException) -> None:
        """Note for the audit that the command has failed on a host."""
        self._failed.setdefault(name, error)

    def release(self, error: BaseException | None = None) -> dict[str, DisaggError]:
        """Give all of them back, also if this thread is interrupted. error: what has ended the command, if anything.
        Returns the machines on which that failed, and why."""
        kept, self._kept = self._kept, {}
        by_machine: dict[str, list[HostLock]] = {}
        for (machine, _), lock in kept.items():
            by_machine.setdefault(machine, []).append(lock)

        def give_back(host: Host) -> None:
            for lock in by_machine[host.name]:
                lock.release(self._failed.get(lock.paths.host, error))

        with interrupted_by(Event()):
            outcomes = each([self._hosts[name] for name in by_machine], give_back)
        return {one.host.name: one.error for one in outcomes if one.error is not None}


def places(hosts: Sequence[Host], make: bool = False) -> list[LockedPlace]:
    """Hosts on their own machines. make: see LockedPlace."""
    return [LockedPlace(host, host.name, make) for host in hosts]


@contextmanager
def kept(locks: FleetLocks, wanted: Sequence[LockedPlace]) -> Iterator[dict[str, DisaggError]]:
    """Within, the locks of these places are kept. Yields what has afterwards the hosts whose lock could not be given
    back, and why: the next command on this machine takes it over."""
    unreleased: dict[str, DisaggError] = {}
    try:
        locks.take(wanted)
        yield unreleased
    except BaseException as error:  # also an interruption, which the audit names
        for other in locks.release(error).values():
            error.add_note(f"a lock was not released: {other.message}")
        raise
    unreleased |= locks.release()
