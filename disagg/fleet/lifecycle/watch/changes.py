"""Readings of the fleet's health, one after the other, and the changes that they show. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from disagg.api.watch import HostChange
from disagg.fleet.lifecycle.status.host_status import HostStatus


@dataclass(slots=True)
class _HostState:
    """What the readings so far show of a host. up: None until that is decided. since: when it went up or down, None if
    that was before the first reading.
    misses: readings in a row in which it was not healthy, the first of them at `missed`."""

    up: bool | None = None
    since: float | None = None
    misses: int = 0
    missed: float = 0.0


@dataclass(slots=True)
class FleetWatch:
    """A host is down after `misses` readings in a row in which it was not healthy, and up after one in which it was.

    A host that is up when the watch begins is no change; one that is down is.
    """

    fleet: str
    misses: int = 2
    _hosts: dict[str, _HostState] = field(default_factory=dict)

    def update(self, statuses: Sequence[HostStatus], now: float) -> list[HostChange]:
        """The changes that this reading shows. now: seconds since 1970."""
        changes = (self._healthy(status, now) if status.ok else self._missed(status, now) for status in statuses)
        return [change for change in changes if change is not None]

    def _healthy(self, status: HostStatus, now: float) -> HostChange | None:
        host = self._hosts.setdefault(status.host, _HostState())
        before, since = host.up, host.since
        host.misses, host.up = 0, True
        if before is True:
            return None
        host.since = now if before is False else None
        return self._change("up", status, now, since) if before is False else None

    def _missed(self, status: HostStatus, now: float) -> HostChange | None:
        host = self._hosts.setdefault(status.host, _HostState())
        host.misses += 1
        if host.misses == 1:
            host.missed = now
        if host.misses < self.misses or host.up is False:
            return None
        since, host.up = host.since, False
        host.since = host.missed
        return self._change("down", status, now, since)

    def _change(self, change: Literal["down", "up"], status: HostStatus, now: float, since: float | None) -> HostChange:
        down = change == "down"
        return HostChange(
            self.fleet,
            status.host,
            change,
            status.state,
            now,
            status.roles,
            status.model,
            status.why if down else "",
            status.hint if down else "",
            max(0.0, now - since) if since is not None else None,
        )


def explained(change: HostChange, status: HostStatus | None) -> HostChange:
    """The change with the state and the reason of this status, which its machine explained; as it is without one."""
    if status is None:
        return change
    return msgspec.structs.replace(change, state=status.state, why=status.why, hint=status.hint)
