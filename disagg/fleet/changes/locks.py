"""Who may change hosts: a lock folder on each, with who holds it, since when and for which command.

A command takes the locks of all hosts that it changes before its first change, in order of names, and keeps them until
its end, so that no other command changes a part of them meanwhile. One refusal gives all of them back. A host that
cannot be reached, or locked, is left out, with the reason.

A lock is taken over if its process ran on this machine and has ended. Any other lock is reported; `--break-lock`
takes it, and the command that it was taken from ends at its next step there: whatever runs on a machine compares the
lock first (`Machine.fences`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Final, NamedTuple

from disagg.config import Host
from disagg.errors import Cancelled, CommandFailed, DisaggError, FleetError, HostLocked, HostUnreachable, LockLost
from disagg.fleet.changes.audit import AUDIT_BOUNDS, Caller
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.connect import Machines
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.interruption import interrupted_by
from disagg.fleet.machine.machine import CommandResult, Fence, Machine, last_lines, script

_TAKEN: Final = 75
_FULL: Final = 28
_WAIT: Final = "nothing was changed; wait until that command has ended, or if it no longer runs: --break-lock"
_SMALL_S: Final = 20.0


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
        """Look at all locks at the same time. It connects, and mostly refuses without having taken anything."""

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


# One host


@contextmanager
def locked(machine: Machine, paths: HostPaths, why: str, break_lock: bool = False) -> Iterator[HostLock]:
    """Within, one host's lock is kept. break_lock: take it from any holder."""
    lock = acquire(machine, paths, Caller.this_process(why), break_lock=break_lock)
    assert lock is not None, "without if_full a full disk is an error"
    try:
        yield lock
    except BaseException as error:  # also an interruption, which the audit names
        _release_after(lock, error)
        raise
    lock.release()


@dataclass(slots=True)
class HostLock:
    """A lock that this process holds on a machine. For the host's audit, when it is given back: current, the release
    that is current then, and lines that could not be written before."""

    machine: Machine
    paths: HostPaths
    holder: Caller
    fence: Fence
    current: str = ""
    lines: list[str] = field(default_factory=list)

    def release(self, error: BaseException | None = None) -> None:
        """Give it back, also if this thread is interrupted. error: why the command failed on this host. Does nothing to
        a lock that another command has taken."""
        self.machine.fences = tuple(one for one in self.machine.fences if one is not self.fence)
        lines = [*self.lines, self.holder.ended(error, self.current)]
        argv = [self.paths.lock, self.holder.to_json(), self.paths.audit, *lines]
        with interrupted_by(Event()):
            result = self._run(argv, "lock_release.sh")
        if not result.ok:
            words = last_lines(result.stderr, 3)
            raise HostUnreachable(f"{self.machine.name}: the lock could not be released: {words}")

    def note(self, lines: Sequence[str]) -> None:
        """Write these lines to the host's audit now, since this process may be killed before it gives the lock back;
        then, if that fails now."""
        try:
            written = self._run([self.paths.audit, *lines], "audit_lines.sh").ok
        except DisaggError:
            written = False
        if not written:
            self.lines += lines

    def _run(self, argv: Sequence[str], name: str) -> CommandResult:
        """Run a script that appends to the audit."""
        return self.machine.run(argv, script=script("audit.sh", name), environment=AUDIT_BOUNDS, timeout=_SMALL_S)


def _release_after(lock: HostLock, error: BaseException) -> None:
    try:
        lock.release(error)
    except DisaggError as other:  # the first error matters; the next run takes the lock over
        error.add_note(f"the lock was not released: {other.message}")


@dataclass(frozen=True, slots=True)
class LockFound:
    """What a host has before its lock is taken. exists: disagg has a folder of the host. holder: the text of the
    lock, None if nobody holds it."""

    home: str
    exists: bool
    holder: str | None = None

    def refusal(self, name: str) -> HostLocked | None:
        """Why its lock cannot be taken now, other than with --break-lock."""
        if self.holder is None:
            return None
        holder = Caller.parse(self.holder)
        if holder is not None and holder.has_ended:
            return None
        return HostLocked(f"{name} is locked: {holder or 'its holder file is unreadable'}", _WAIT)


def look(machine: Machine, name: str) -> LockFound:
    """The lock of a host on this machine. Changes nothing."""
    result = machine.run([name], script=script("lock_look.sh"), timeout=_SMALL_S)
    if not result.ok:
        words = last_lines(result.stderr, 3)
        raise FleetError(f"{name}: its home folder cannot be read: {words}", f"disagg ssh {machine.name}")
    home, exists, *lock = result.stdout.split("\n", 3)
    holder = "\n".join(lock[1:]).strip() if lock and lock[0] == "locked" else None
    return LockFound(home, exists == "yes", holder)


def acquire(
    machine: Machine,
    paths: HostPaths,
    holder: Caller,
    *,
    break_lock: bool = False,
    if_full: bool = False,
    may_go: bool = False,
) -> HostLock | None:
    """Take a host's lock. HostLocked if another command holds it; `break_lock` takes it from any. None if its disk has
    no room for one and `if_full` allows to go on without. may_go: this command removes the host's folder."""
    lost = partial(_lost, paths.host)
    fence = Fence(f"{paths.lock}/holder", holder.to_json(), lost, paths.folder if may_go else "")
    lock = HostLock(machine, paths, holder, fence)
    try:
        taken = _take(lock, "*" if break_lock else "", if_full)
    except BaseException as error:
        if isinstance(error, Cancelled) or not isinstance(error, DisaggError):  # it may have been taken all the same
            _release_after(lock, error)
        raise
    if not taken:
        return None
    machine.fences = (*machine.fences, fence)
    return lock


def _take(lock: HostLock, take_over: str, if_full: bool) -> bool:
    """False if there is no room for a lock and `if_full` allows to go on without one. take_over: the holder whose lock
    may be taken, or "*" for any."""
    paths = lock.paths
    argv = [paths.lock, lock.holder.to_json(), take_over, paths.audit, lock.holder.began()]
    result = lock._run(argv, "lock_acquire.sh")
    if result.ok:
        return True
    if result.code == _FULL and if_full:
        return False
    if result.code != _TAKEN:
        words = last_lines(result.stderr, 3) or f"exit code {result.code}"
        full = "its disk is full: make room there, or disagg uninstall"
        raise CommandFailed(
            f"{paths.host}: cannot lock it: {words}",
            full if result.code == _FULL else f"is {paths.folder} writable there?",
            exit_status=result.code,
            stdout=result.stdout,
        )
    found = result.stdout.strip()
    if (refusal := LockFound("", True, found).refusal(paths.host)) is not None:
        raise refusal
    if found == take_over:
        raise CommandFailed(f"{paths.host}: the lock of an ended command cannot be removed", f"rm -r {paths.lock}")
    return _take(lock, found, if_full)


def _lost(host: str, found: str) -> LockLost:
    """found: the text of the lock that is there now, "" without one."""
    holder = Caller.parse(found)
    by = str(holder) if holder is not None else "another command has taken it, and has ended"
    hint = f"this command has ended there; what else has changed it: disagg logs --audit --host {host}"
    return LockLost(f"{host}: this command has lost its lock: {by}", hint)
