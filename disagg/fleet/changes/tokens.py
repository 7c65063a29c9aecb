"""Whose token a host has: this machine's, or that of another clone or operator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing

from disagg.config import Host
from disagg.errors import UsageError
from disagg.fleet.facts.paths import HostPaths
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.connect import machine_for
from disagg.fleet.machine.fan_out import each


def digest(token: str) -> str:
    """The SHA-256 of the file that a token is in on a host, as hosts report it. Its first 8 digits name a token."""
    return hashlib.sha256(f"{token}\n".encode()).hexdigest()


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
        groups = "; ".join(f"{digest(token)[:8]} on {', '.join(names)}" for token, names in holders.items())
        hint = "choose whose: disagg deploy --adopt-token --host NAME, then disagg deploy --replace-token"
        raise UsageError(f"the hosts have different tokens: {groups}", hint)
    return next(iter(holders))
