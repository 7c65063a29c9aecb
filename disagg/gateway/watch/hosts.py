"""The hosts in the live view: the state of each in the client's view, with a reason and a hint if it gets no requests.

Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from disagg.api.gateway import HostState, LiveHost
from disagg.api.status import Load
from disagg.config import Fleet, Host
from disagg.inference.hosts.view import FleetView, HostView

_STATES: Final[Mapping[str, tuple[HostState, str, str]]] = {
    "loading": ("loading", "it loads its model", ""),
    "draining": ("draining", "it finishes its requests and stops", "disagg start --host {name}"),
    "stalled": ("stalled", "its engine makes no progress", "disagg restart --host {name}"),
    "error": ("error", "its engine has stopped", "disagg restart --host {name}"),
}
"""State, reason and the command that helps, by the status of GET /load."""
_OF_LOAD: Final = {*LiveHost.__struct_fields__} & {*Load.__struct_fields__}
"""The figures of a host that it states itself."""


def live_hosts(fleet: Fleet, view: FleetView, now: float) -> tuple[LiveHost, ...]:
    """The hosts that requests may use, in the order of hosts.toml. now: time.monotonic()."""
    return tuple(_live(host, view.of(host.name), now) for host in fleet.answering_hosts)


def _live(host: Host, seen: HostView, now: float) -> LiveHost:
    state, reason, hint = _state(host, seen, now)
    load = seen.load if state not in ("down", "unknown") else None
    figures = {name: getattr(load, name) for name in _OF_LOAD} if load is not None else {}
    return LiveHost(
        name=host.name, role=host.roles[0], model=host.model, state=state, reason=reason, hint=hint, **figures
    )


def _state(host: Host, seen: HostView, now: float) -> tuple[HostState, str, str]:
    if seen.reachable == "down":
        hint = "start that server: disagg does not manage it" if host.whole else f"disagg start --host {host.name}"
        return "down", f"it does not answer at {host.url}", hint
    if seen.reachable == "unknown":
        return "unknown", "it was not asked yet", ""
    if seen.load is not None and seen.load.status in _STATES:
        state, reason, hint = _STATES[seen.load.status]
        return state, reason, hint.format(name=host.name)
    if obstacle := seen.obstacle(now):
        return "failing", obstacle, f"disagg {'status' if host.whole else f'logs --host {host.name}'}"
    return "up", "", ""
