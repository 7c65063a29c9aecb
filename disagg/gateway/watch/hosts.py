"""The hosts in the live view: the state of each in the client's view, with a reason and a hint if it gets no requests;
and what they state of each model.

Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from disagg.api.gateway import HostState, LiveHost, ModelWord
from disagg.api.keeper import KeptModel, ModelFacts
from disagg.api.status import Load
from disagg.config import Fleet, Host
from disagg.inference.hosts.view import FleetView, HostView
from disagg.units import estimate

_STATES: Final[Mapping[str, tuple[HostState, str, str]]] = {
    "loading": ("loading", "it loads its model", ""),
    "draining": ("draining", "it finishes its requests and stops", "disagg start --host {name}"),
    "stalled": ("stalled", "its engine makes no progress", "disagg restart --host {name}"),
    "error": ("error", "its engine has stopped", "disagg restart --host {name}"),
}
"""State, reason and the command that helps, by the status of GET /load."""
_KEPT: Final[Mapping[str, tuple[HostState, str, str]]] = {
    "loading": ("loading", "it loads the model, {left} left", ""),
    "draining": ("draining", "it finishes its requests and unloads the model", ""),
    "asleep": ("asleep", "the first request loads the model", ""),
    "failed": ("failed", "{reason}", "disagg logs --host {table} --model {model}"),
    "absent": ("absent", "{reason}", "disagg models pull {model} --host {table}"),
}
"""The same of a model of a host with several, by the state that its keeper states."""
_OF_LOAD: Final = {*LiveHost.__struct_fields__} & {*Load.__struct_fields__}
"""The figures of a host that it states itself."""
_WORDS: Final[Mapping[HostState, ModelWord]] = {
    "up": "ready",
    "draining": "draining",
    "loading": "loading",
    "asleep": "asleep",
    "failed": "failed",
    "absent": "absent",
}
"""States of hosts as those of their models, that which tells most of a model first. The others: it is down."""


def live_hosts(fleet: Fleet, view: FleetView, now: float) -> tuple[LiveHost, ...]:
    """What requests may use, in the order of hosts.toml: of a host with several models an entry for each, named
    HOST/MODEL. now: time.monotonic()."""
    return tuple(_live(host, view.of(host.name), now) for host in fleet.answering_hosts)


def _live(host: Host, seen: HostView, now: float) -> LiveHost:
    state, reason, hint = _state(host, seen, now)
    load = seen.load if state not in ("down", "unknown") else None
    figures = {name: getattr(load, name) for name in _OF_LOAD} if load is not None else {}
    if seen.kept is not None and seen.kept.facts is not None:
        figures["facts"] = seen.kept.facts
    return LiveHost(
        name=host.name,
        role=host.roles[0],
        model=host.model,
        state=state,
        reason=reason,
        hint=hint,
        kept=seen.kept if state not in ("down", "unknown") else None,
        **figures,
    )


def _state(host: Host, seen: HostView, now: float) -> tuple[HostState, str, str]:
    if seen.reachable == "down":
        hint = "start that server: disagg does not manage it" if host.whole else f"disagg start --host {host.table}"
        return "down", f"it does not answer at {host.url}", hint
    if seen.reachable == "unknown":
        return "unknown", "it was not asked yet", ""
    if seen.kept is not None and seen.kept.state in _KEPT:
        return _of_kept(host, seen.kept)
    if seen.load is not None and seen.load.status in _STATES:
        state, reason, hint = _STATES[seen.load.status]
        return state, reason, hint.format(name=host.table)
    if obstacle := seen.obstacle(now):
        return "failing", obstacle, f"disagg {'status' if host.whole else f'logs --host {host.table}'}"
    return "up", "", ""


def _of_kept(host: Host, kept: KeptModel) -> tuple[HostState, str, str]:
    state, reason, hint = _KEPT[kept.state]
    said = reason.format(left=estimate(kept.wait_s), reason=kept.reason or f"the model is {kept.state}")
    return state, said, hint.format(table=host.table, model=shlex.quote(host.model))


@dataclass(frozen=True, slots=True)
class SeenModel:
    """What the hosts state of one model. state: that of the host on which it is readiest. facts: what its files say,
    None if no host has stated it. kept: by hosts with several models."""

    state: ModelWord
    facts: ModelFacts | None
    kept: tuple[KeptModel, ...] = ()

    @classmethod
    def of(cls, hosts: Sequence[LiveHost], model: str) -> SeenModel:
        """hosts: of all models."""
        own = [host for host in hosts if host.model == model]
        words = {_WORDS.get(host.state, "down") for host in own}
        return cls(
            next((word for word in _WORDS.values() if word in words), "down"),
            next((host.facts for host in own if host.facts is not None), None),
            tuple(host.kept for host in own if host.kept is not None),
        )

    @property
    def loaded(self) -> bool:
        """Whether a host has it in memory."""
        return self.state in ("ready", "draining")

    @property
    def size_bytes(self) -> int:
        """Of its files."""
        return self.facts.size_bytes if self.facts else max((one.total_bytes for one in self.kept), default=0)

    @property
    def memory_bytes(self) -> int:
        """What it takes on one host where it is loaded, as far as is known."""
        return max((one.resident_bytes or one.need_bytes for one in self.kept), default=self.size_bytes)

    @property
    def expires_s(self) -> float | None:
        """Until the last host unloads it; None: never."""
        loaded = [one.expires_s for one in self.kept if one.state in ("ready", "draining")]
        known = [seconds for seconds in loaded if seconds is not None]
        return max(known) if known and len(known) == len(loaded) else None

    @property
    def left_s(self) -> float | None:
        """Until it is loaded on the first host that loads it; None if none does."""
        return min((one.wait_s for one in self.kept if one.state == "loading"), default=None)
