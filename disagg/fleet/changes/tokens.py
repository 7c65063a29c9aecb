"""Whose token a host has: this machine's, or that of another clone or operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from disagg.config import Host
from disagg.errors import DisaggError, FleetError, UsageError
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import each
from disagg.token import is_usable, token_digest


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """The tokens that hosts have. holders: token -> names of its hosts. missing: the hosts that did not answer, and
    why."""

    holders: Mapping[str, tuple[str, ...]] = field(repr=False)
    missing: Mapping[str, DisaggError]

    @property
    def not_asked(self) -> str:
        """The end of a message: which hosts did not answer."""
        return f" ({', '.join(self.missing)} did not answer)" if self.missing else ""

    def only(self) -> str:
        """The one token that these hosts have; hosts without one do not count. UsageError if none has one, if they
        differ, or if it is unusable. If no host answers, why the first does not."""
        if not self.holders:
            for error in self.missing.values():
                raise error
            raise UsageError("no host has a token that could be adopted", "disagg deploy")
        if len(self.holders) > 1:
            groups = "; ".join(
                f"{token_digest(token)[:8]} on {', '.join(names)}" for token, names in self.holders.items()
            )
            hint = "choose whose: disagg deploy --adopt-token --host NAME, then disagg deploy --replace-token"
            raise UsageError(f"the hosts have different tokens: {groups}{self.not_asked}", hint)
        token, names = next(iter(self.holders.items()))
        if not is_usable(token):
            hint = f"disagg deploy --replace-token --host {names[0]} puts this machine's there"
            raise UsageError(f"the token of {', '.join(names)} is no token of disagg", hint)
        return token


def held_tokens(hosts: Sequence[Host], connect: Callable[[Host], Machine] = machine_for) -> HeldTokens:
    """The tokens that these hosts have."""

    def read(host: Host) -> str:
        with closing(connect(host)) as machine:
            return (machine.read(HostPaths("~", host.name).token, limit=4096) or b"").decode("ascii", "replace").strip()

    holders: dict[str, tuple[str, ...]] = {}
    outcomes = each(hosts, read)
    for outcome in outcomes:
        if outcome.value:
            holders[outcome.value] = (*holders.get(outcome.value, ()), outcome.host.name)
    return HeldTokens(holders, {outcome.host.name: outcome.error for outcome in outcomes if outcome.error is not None})


def adoptable(chosen: Sequence[Host], fleet: HeldTokens, ours: str) -> str:
    """The token of the chosen hosts, which is to be this machine's too. fleet: what all deployed hosts have. ours: this
    machine's token, "" if it has none. UsageError if other hosts have `ours`: they would be locked out."""
    names = {host.name for host in chosen}
    some = {token: held for token, all_ in fleet.holders.items() if (held := tuple(n for n in all_ if n in names))}
    token = HeldTokens(some, {name: error for name, error in fleet.missing.items() if name in names}).only()
    if token != ours and (users := fleet.holders.get(ours)):
        raise UsageError(
            f"{', '.join(users)} has this machine's token {token_digest(ours)[:8]}, which adopting would replace",
            f"disagg deploy --replace-token --host {' --host '.join(some[token])} puts this machine's token there",
        )
    return token


def another(token: str, there: str, host: str) -> tuple[str, str] | None:
    """Cause and hint if a host has a token that is not this machine's. token: empty if this machine has none. there:
    the digest of the host's token, empty if it has none."""
    if there in ("", token_digest(token)):
        return None
    ours = f"this machine's is {token_digest(token)[:8]}" if token else "this machine has none"
    return (
        f"it has the token {there[:8]} of another operator, and {ours}",
        f"disagg deploy --host {host} --adopt-token uses its token here from now on; "
        "--replace-token puts this machine's there, and locks out whoever has the other",
    )


def require_own(token: str, there: str, host: str) -> None:
    """FleetError if a host has a token that is not this machine's: whether its server is healthy could not be seen."""
    if (found := another(token, there, host)) is not None:
        raise FleetError(f"{host}: {found[0]}", found[1])


def require_none(fleet: HeldTokens) -> None:
    """UsageError if a host has a token, before this machine makes one of its own."""
    if fleet.holders:
        groups = "; ".join(f"{token_digest(token)[:8]} on {', '.join(names)}" for token, names in fleet.holders.items())
        raise UsageError(
            f"this machine has no token, and the fleet has one: {groups}",
            "disagg deploy --adopt-token uses it here from now on; --replace-token makes a new one, and locks out "
            "whoever has the other",
        )
