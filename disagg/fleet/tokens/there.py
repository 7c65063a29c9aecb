"""Whose tokens a host has: this machine's, or those of another clone or operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from disagg.config import Host
from disagg.errors import DisaggError, FleetError, UsageError
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.connect import Connect, machine_for
from disagg.fleet.machine.fan_out import each
from disagg.fleet.machine.machine import Machine
from disagg.fleet.tokens.here import OwnTokens
from disagg.token import is_usable, parse_tokens, token_digest


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """What is known of the tokens of hosts. by_host: of each host that has any, the current one first. missing: the
    hosts that did not answer, and why."""

    by_host: Mapping[str, tuple[str, ...]] = field(repr=False)
    missing: Mapping[str, DisaggError]

    @property
    def not_asked(self) -> str:
        """The end of a message: which hosts did not answer."""
        return f" ({', '.join(self.missing)} did not answer)" if self.missing else ""

    @property
    def groups(self) -> str:
        """Which hosts have which tokens: `3f2a11bc on a, b; 9c04d7e1 on c`."""
        return grouped({name: shown(tokens) for name, tokens in self.by_host.items()})

    def common(self) -> tuple[str, ...]:
        """The tokens that all these hosts have; hosts without any do not count. UsageError if none has one, if they
        share none, or if one is unusable. If no host answers, why the first does not."""
        if not self.by_host:
            for error in self.missing.values():
                raise error
            raise UsageError("no host has a token that could be adopted", "disagg deploy")
        first, *others = self.by_host.values()
        tokens = tuple(token for token in first if all(token in other for other in others))
        if not tokens:
            hint = "choose whose: disagg deploy --adopt-token --host NAME, then disagg deploy --replace-token"
            raise UsageError(f"the hosts have different tokens: {self.groups}{self.not_asked}", hint)
        if not all(map(is_usable, tokens)):
            names = list(self.by_host)
            hint = f"disagg deploy --replace-token --host {names[0]} puts this machine's there"
            raise UsageError(f"the token of {', '.join(names)} is no token of disagg", hint)
        return tokens


def grouped(found: Mapping[str, str]) -> str:
    """`3f2a11bc on a, b; 9c04d7e1 on c`, of values by host."""
    values = dict.fromkeys(found.values())
    return "; ".join(f"{value} on {', '.join(name for name in found if found[name] == value)}" for value in values)


def shown(tokens: Sequence[str]) -> str:
    """What names tokens in messages: the first 8 digits of each one's hash."""
    return ", ".join(token_digest(token)[:8] for token in tokens)


def known_tokens(hosts: Sequence[Host], connect: Connect = machine_for) -> KnownTokens:
    """The tokens that these hosts have."""

    def read(host: Host) -> tuple[str, ...]:
        with closing(connect(host)) as machine:
            return read_there(machine, host)

    outcomes = each(hosts, read)
    return KnownTokens(
        {outcome.host.name: outcome.value for outcome in outcomes if outcome.value},
        {outcome.host.name: outcome.error for outcome in outcomes if outcome.error is not None},
    )


def read_there(machine: Machine, host: Host) -> tuple[str, ...]:
    """The tokens that a host has; none if it has no file of them."""
    raw = machine.read(HostPaths("~", host.name).token, limit=4096) or b""
    return parse_tokens(raw.decode("ascii", "replace"))


def adoptable(own: OwnTokens, chosen: Sequence[Host], there: KnownTokens) -> tuple[str, ...]:
    """The tokens of the chosen hosts, which are to be this machine's too. there: those of all deployed hosts.

    UsageError if other hosts share none but those with this machine: they would be locked out. ConfigError if this
    machine's must not be overwritten.
    """
    own.require_made()
    ours, names = own.all if own.exists() else (), {host.name for host in chosen}
    some = {name: tokens for name, tokens in there.by_host.items() if name in names}
    tokens = KnownTokens(some, {name: error for name, error in there.missing.items() if name in names}).common()
    users = [
        name
        for name, known in there.by_host.items()
        if not set(known).isdisjoint(ours) and set(known).isdisjoint(tokens)
    ]
    if users:
        raise UsageError(
            f"{', '.join(users)} has this machine's token {shown(ours)}, which adopting would replace",
            f"disagg deploy --replace-token --host {' --host '.join(some)} puts this machine's token there",
        )
    return tokens


def foreign_token(tokens: Sequence[str], there: Sequence[str], host: str) -> tuple[str, str] | None:
    """Cause and hint if a host has tokens, and none of them is this machine's. there: the digests of the host's."""
    if not there or not set(there).isdisjoint(map(token_digest, tokens)):
        return None
    ours = f"this machine's is {token_digest(tokens[0])[:8]}" if tokens else "this machine has none"
    return (
        f"it has the token {there[0][:8]} of another operator, and {ours}",
        f"disagg deploy --host {host} --adopt-token uses its token here from now on; "
        "--replace-token puts this machine's there, and locks out whoever has the other",
    )


def require_own(tokens: Sequence[str], there: Sequence[str], host: str) -> None:
    """FleetError if a host has tokens, and none of them is this machine's: whether its server is healthy could not be
    seen."""
    if (found := foreign_token(tokens, there, host)) is not None:
        raise FleetError(f"{host}: {found[0]}", found[1])


def adopt_or_make(own: OwnTokens, adopted: Sequence[str], replace: bool, read: Callable[[], KnownTokens]) -> bool:
    """Before a deployment: keep the adopted tokens here, or make one if there is none. Whether one was made. read:
    those of all deployed hosts. UsageError if they have one and this machine has none; replace: make one anyway."""
    if adopted:
        own.adopt(adopted)
        return False
    if own.exists():
        return False
    if not replace and (there := read()).by_host:
        raise UsageError(
            f"this machine has no token, and the fleet has one: {there.groups}",
            "disagg deploy --adopt-token uses it here from now on; --replace-token makes a new one, and locks out "
            "whoever has the other",
        )
    own.ensure()
    return True
