"""Whose token a host has: this machine's, or that of another clone or operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from disagg.config import Host
from disagg.errors import UsageError
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import each
from disagg.token import token_digest


def token_of(hosts: Sequence[Host], connect: Callable[[Host], Machine] = machine_for) -> str:
    """The token that these hosts have. Those that have none, or do not answer, do not count. UsageError if none has
    one, or if they differ."""

    def read(host: Host) -> str:
        with closing(connect(host)) as machine:
            return (machine.read(HostPaths("~", host.name).token, limit=4096) or b"").decode("ascii", "replace").strip()

    holders: dict[str, list[str]] = {}
    for outcome in each(hosts, read):
        if outcome.value:
            holders.setdefault(outcome.value, []).append(outcome.host.name)
    if not holders:
        raise UsageError("no host has a token that could be adopted", "disagg deploy")
    if len(holders) > 1:
        groups = "; ".join(f"{token_digest(token)[:8]} on {', '.join(names)}" for token, names in holders.items())
        hint = "choose whose: disagg deploy --adopt-token --host NAME, then disagg deploy --replace-token"
        raise UsageError(f"the hosts have different tokens: {groups}", hint)
    return next(iter(holders))
