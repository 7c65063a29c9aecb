"""Replace the fleet's token while the fleet serves: host by host, and only forward.

    this machine    hosts         until
    old             old           -
    old + new       old, new      every server accepts the new one
    new, old        new, old      every caller shows the new one: they read their file for each request
    new             new           -

`old + new` here is two files: token, and token.next with the new one. So whichever step was interrupted can be told,
and `rotate` goes on from there. No step begins before all hosts have the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from disagg.config import Fleet, Host
from disagg.errors import FleetError
from disagg.fleet.changes.tokens import read_there, require_own, shown
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.lifecycle.deployed import changing_there
from disagg.fleet.lifecycle.state import State
from disagg.fleet.lifecycle.status.health import poll_host
from disagg.fleet.machine import interruption
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import each
from disagg.token import token_digest, tokens_text

_ACCEPT_S: Final = 15.0
"""How long a server may take to accept a token that was added to its file; it reads the file for each request."""

OnHost = Callable[[str, str], None]
"""Called with (host, what was done there), from several threads."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """One rotation of a fleet's token, which may have been begun by an earlier command."""

    fleet: Fleet
    state: State
    report: OnHost = lambda host, done: None
    connect: Callable[[Host], Machine] = machine_for
    break_lock: bool = False
    accept_s: float = _ACCEPT_S

    @property
    def begun(self) -> bool:
        """Whether an earlier command has begun one that has not ended."""
        return self.state.next_token() is not None or len(self.state.tokens()) > 1

    def run(self) -> str:
        """Carry it out, or go on with it; the new token. FleetError if a host could not be changed: the fleet serves as
        before, and the next `run` goes on."""
        with self.state.locked("token rotate"):
            if (new := self.state.ensure_next_token()) is not None:
                old = next(token for token in self.state.tokens() if token != new)
                self._everywhere((old, new), check=True)
                self._here(old, new)
                self._everywhere((new, old))
                self.state.write_tokens((new, old))
                self.state.drop_next_token()
            current = self.state.tokens()[0]
            self._everywhere((current,))
            self.state.write_tokens((current,))
            return current

    def _here(self, old: str, new: str) -> None:
        """Add the new token to this machine's file, which servers of local hosts read."""
        self.state.write_tokens((old, new))
        try:
            for host in self.fleet.hosts.values():
                if host.placement.spawned:
                    self._accepts(host, new)
        except FleetError:
            self.state.write_tokens((old,))
            raise

    def _everywhere(self, tokens: tuple[str, ...], check: bool = False) -> None:
        """Write the tokens on every host. The first failure is raised when all hosts are through. check: a running
        server must accept the last one, else it is taken out again; the order of the tokens there does not matter."""
        hosts = [host for host in self.fleet.hosts.values() if host.placement.deployed]
        failed = [outcome for outcome in each(hosts, lambda host: self._write(host, tokens, check)) if not outcome.ok]
        if failed and (error := failed[0].error) is not None:
            again = "the fleet serves as before; go on with: disagg token rotate"
            error.hint = f"{error.hint}; {again}" if error.hint else again
            raise error

    def _write(self, host: Host, tokens: tuple[str, ...], check: bool) -> None:
        with (
            closing(self.connect(host)) as machine,
            changing_there(machine, host.name, "token rotate", self.break_lock, if_full=False),
        ):
            if not (before := read_there(machine, host)):  # nothing is deployed there
                return
            require_own(tokens, [token_digest(token) for token in before], host.name)
            path = HostPaths("~", host.name).token
            if before != tokens and not (check and set(tokens).issubset(before)):
                machine.write(path, tokens_text(tokens).encode(), mode=0o600)
                self.report(host.name, f"has {shown(tokens)}")
            try:
                if check:
                    self._accepts(host, tokens[-1])
            except FleetError:
                machine.write(path, tokens_text(tokens[:1]).encode(), mode=0o600)
                raise

    def _accepts(self, host: Host, token: str) -> None:
        """FleetError if the host's server runs and does not accept this token."""
        deadline = time.monotonic() + self.accept_s
        while poll_host(host, token, self.state).state == "unauthorised":
            if time.monotonic() > deadline:
                deploy = "" if host.placement.spawned else f"disagg deploy --host {host.name} && "
                raise FleetError(
                    f"{host.name}: its server does not accept a token that was added to its file: it runs an earlier "
                    "disagg, which reads the file only when it starts",
                    f"{deploy}disagg restart --host {host.name}",
                )
            interruption.sleep(0.2)
