"""Replace the fleet's token while the fleet serves: host by host, and only forward.

    this machine    hosts         until
    old             old           -
    old + new       old, new      every server that runs accepts the new one
    new, old        new, old      every caller shows the new one, and the requests that show the old one have been read
    new             new           -

`old + new` here is two files: token, and token.next with the new one. They show which step was interrupted, and
`rotate` goes on from there. No step begins before all hosts have completed the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, NamedTuple

from disagg.config import Fleet, Host
from disagg.errors import DisaggError, FleetError
from disagg.fleet.changes.locks import FleetLocks, kept, places
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.facts.server import read_server_facts
from disagg.fleet.machine import interruption
from disagg.fleet.machine.connect import Connect, Machines, machine_for
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.machine import Machine
from disagg.fleet.tokens.here import OwnTokens
from disagg.fleet.tokens.there import read_there, require_own, shown
from disagg.token import token_digest, tokens_text

WHY: Final = "token rotate"
_ACCEPT_S: Final = 15.0
"""How long a server may take to accept a token that was added to its file; it reads the file for each request."""
GRACE_S: Final = 12.0
"""How long the old token is accepted once every caller shows the new one: the head of a request, which holds the token
that was current when its caller began it, may take 10 s."""

OnHost = Callable[[str, str], None]
"""Called with (host, what was done there), from several threads."""


class Rotated(NamedTuple):
    """before: the token that is accepted no more. current: the one that replaced it."""

    before: str
    current: str


@dataclass(frozen=True, slots=True)
class Rotation:
    """One rotation of a fleet's token, which may have been begun by an earlier command. own: those of this machine.
    lock: holds the fleet's lock here for a command. refuses: why a host's server does not accept a token; None if it
    does, or does not run as far as this machine knows."""

    fleet: Fleet
    own: OwnTokens
    lock: Callable[[str], AbstractContextManager[None]]
    refuses: Callable[[Host, str], FleetError | None]
    report: OnHost = lambda host, done: None
    connect: Connect = machine_for
    break_lock: bool = False
    accept_s: float = _ACCEPT_S
    grace_s: float = GRACE_S

    def run(self) -> Rotated:
        """Carry it out, or go on with it. HostLocked, with nothing changed, if another command changes a host.
        FleetError if a host could not be changed: the fleet serves as before, and the next `run` goes on."""
        with (
            self.lock(WHY),
            self.own.locked(WHY),
            Machines(self.connect) as machines,
        ):
            locks = FleetLocks(machines, WHY, self.break_lock)
            with kept(locks, places(self.fleet.deployed_hosts)) as unreleased:
                for error in locks.left_out.values():
                    raise _again(error)
                rotated = self._run(locks)
            for name, lost in unreleased.items():
                self.report(name, lost.message)
            return rotated

    def _run(self, locks: FleetLocks) -> Rotated:
        if not self.own.rotating:
            self._require_own(locks)
        if (new := self.own.ensure_next()) is not None:
            old = next(token for token in self.own.all if token != new)
            self._everywhere(locks, (old, new), check=True)
            self._here(old, new)
            self._everywhere(locks, (new, old))
            self.own.write((new, old))
            self.own.drop_next()
        interruption.sleep(self.grace_s)
        current, *others = self.own.all
        self._everywhere(locks, (current,))
        self.own.write((current,))
        return Rotated(others[-1] if others else current, current)

    def _require_own(self, locks: FleetLocks) -> None:
        """FleetError, before anything has begun, if a host has the tokens of another operator only."""
        tokens = self.own.all

        def check(host: Host) -> None:
            if there := read_there(locks.machine(host), host):
                require_own(tokens, [token_digest(token) for token in there], host.name)

        for one in each(self.fleet.deployed_hosts, check):
            if one.error is not None:
                raise one.error

    def _here(self, old: str, new: str) -> None:
        """Add the new token to this machine's file, which servers of local hosts read."""
        self.own.write((old, new))
        try:
            for host in self.fleet.hosts.values():
                if host.server_kind.spawned:
                    self._accepts(host, new)
        except FleetError:
            self.own.write((old,))
            raise

    def _everywhere(self, locks: FleetLocks, tokens: tuple[str, ...], check: bool = False) -> None:
        """Write the tokens on every host. The first failure is raised when all hosts are through. check: a running
        server must accept the last one, else it is taken out again; the order of the tokens there does not matter."""

        def write(host: Host) -> None:
            self._write(host, locks.machine(host), tokens, check)

        failed = [one for one in each(self.fleet.deployed_hosts, write) if one.error is not None]
        for one in failed:
            if one.error is not None:
                locks.failed(one.host.name, one.error)
        if failed and (error := failed[0].error) is not None:
            raise _again(error)

    def _write(self, host: Host, machine: Machine, tokens: tuple[str, ...], check: bool) -> None:
        if not (before := read_there(machine, host)):  # nothing is deployed there
            return
        require_own(tokens, [token_digest(token) for token in before], host.name)
        path = HostPaths("~", host.name).token
        if before != tokens and not (check and set(tokens).issubset(before)):
            machine.write(path, tokens_text(tokens).encode(), mode=0o600)
            self.report(host.name, f"has {shown(tokens)}")
        try:
            if check:
                self._accepts(host, tokens[-1], lambda: read_server_facts(machine, host.name, None).pid is not None)
        except FleetError:
            machine.write(path, tokens_text(before).encode(), mode=0o600)
            raise

    def _accepts(self, host: Host, token: str, runs: Callable[[], bool] = lambda: True) -> None:
        """FleetError unless the host's server shows that it accepts this token, or does not run: then it reads the file
        when it starts."""
        deadline = time.monotonic() + self.accept_s
        while (error := self.refuses(host, token)) is not None and runs():
            if time.monotonic() > deadline:
                raise error
            interruption.sleep(0.2)


def _again(error: DisaggError) -> DisaggError:
    """The error, with what to do about the rotation."""
    again = "the fleet serves as before; go on with: disagg token rotate"
    error.hint = f"{error.hint}; {again}" if error.hint else again
    return error
