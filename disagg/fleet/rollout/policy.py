"""The hosts' states and the settings -> the next steps of a rollout. Pure: no I/O.

A host is taken down only if at most `max_unavailable` hosts of the fleet are down then, and if another healthy host
is left for each model and role that it shares with others. Hosts that are down already come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Phase = Literal["before", "new", "passed", "failed", "back", "stuck", "outside"]
"""before: the new release does not run there yet. new: it runs, and was not tested. passed: it runs, and its answer is
right. failed: it did not come up, or its answer is wrong. back: the release from before runs again. stuck: that one
does not come up either. outside: not a part of the rollout."""
Action = Literal["restart", "test", "return", "forget"]
"""restart: run the new release. test: compare its answer. return: run the release from before again. forget: make the
release current again that was before the rollout."""

UNDOING: Final[frozenset[Phase]] = frozenset({"failed", "back", "stuck"})


@dataclass(frozen=True, slots=True)
class HostState:
    """One host of the fleet. serves: its (model, role) pairs. pending: the rollout has made the new release current,
    and nothing was restarted for it."""

    name: str
    serves: frozenset[tuple[str, str]]
    phase: Phase = "before"
    healthy: bool = True
    pending: bool = True

    @property
    def up(self) -> bool:
        """Whether it serves as it should. One with wrong answers does not."""
        return self.healthy and self.phase not in ("failed", "stuck")


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do on these hosts at the same time. Without any the rollout ends: it is blocked by what `blocked` names,
    or nothing is left to do."""

    action: Action = "restart"
    hosts: tuple[str, ...] = ()
    blocked: str = ""


def next_turn(hosts: Sequence[HostState], max_unavailable: int, undo: bool = False) -> Turn:
    """What to do next. max_unavailable: how many hosts of the fleet may be down at the same time. undo: go back
    although no host has failed, because the new release could not be deployed."""
    if undo or any(host.phase in UNDOING for host in hosts):
        pending = [host.name for host in hosts if host.phase in ("before", "outside") and host.pending]
        if pending:  # nothing is restarted, so all at once
            return Turn("forget", tuple(pending))
        changed = [host for host in hosts if host.phase in ("failed", "new", "passed")]
        failed = [host for host in changed if host.phase == "failed"]
        return _down("return", failed or changed, hosts, max_unavailable)
    if untested := [host.name for host in hosts if host.phase == "new"]:
        return Turn("test", tuple(untested))
    return _down("restart", [host for host in hosts if host.phase == "before"], hosts, max_unavailable)


def _down(action: Action, waiting: Sequence[HostState], hosts: Sequence[HostState], max_unavailable: int) -> Turn:
    """The action, which takes hosts down, on as many of these as may be down together."""
    chosen: list[HostState] = []
    for host in sorted(waiting, key=lambda host: host.up):
        if len(chosen) < max_unavailable and not _obstacle(host, chosen, hosts, max_unavailable):
            chosen.append(host)
    if chosen or not waiting:
        return Turn(action, tuple(host.name for host in chosen))
    return Turn(blocked=_obstacle(waiting[0], (), hosts, max_unavailable))


def _obstacle(host: HostState, chosen: Sequence[HostState], hosts: Sequence[HostState], max_unavailable: int) -> str:
    """Why the host must not be taken down together with those chosen, "" if it may."""
    if not host.up:
        return ""
    down = [one.name for one in hosts if not one.up or one in chosen]
    if len(down) >= max_unavailable:
        return f"{', '.join(down)} is down, and {host.name} would be too"
    for model, role in sorted(host.serves):
        others = [one for one in hosts if one.name != host.name and (model, role) in one.serves]
        if others and all(one.name in down for one in others):
            return f"{host.name} is the last healthy host for {role} of {model or 'clients'}"
    return ""
