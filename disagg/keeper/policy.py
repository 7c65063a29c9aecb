"""Which model a keeper loads next, and which ones go for it. Pure; times are time.monotonic(), sizes bytes.

Models are loaded one at a time, in the order in which they were asked for. What does not fit takes the room of the
least recently used models that are idle, not pinned and have stayed for min_stay. If these are not enough, models that
answer requests take their turn: after min_stay they are given no new request, and go once they have answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from disagg.api.keeper import EvictionReason, ModelState

LOADED: Final[frozenset[ModelState]] = frozenset({"loading", "ready", "draining"})
HANDOVER_S: Final = 1.0
"""For those who waited for a model to reach it, whatever min_stay is."""
DRAIN_S: Final = 10.0
"""What a model that answers requests is expected to take until it has answered them: assumed."""
NEVER_S: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A model. busy: requests run on it or wait at it. ready_at: when it was loaded. goes_at: when it goes if it stays
    idle, and why."""

    name: str
    state: ModelState = "asleep"
    need: int = 0
    busy: bool = False
    pinned: bool = False
    ready_at: float = -inf
    used_at: float = -inf
    goes_at: float = inf
    goes_for: EvictionReason = "idle"


@dataclass(frozen=True, slots=True)
class Want:
    """Somebody waits for a model; "": for so much memory, which is not for a model of this host. evicts: others may go
    for it; if not, it is left out while it does not fit."""

    model: str
    need: int
    evicts: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """budget: bytes of this host's models together, now. max_loaded: how many of them, None: as many as fit. elsewhere:
    bytes that other hosts of the machine may give up."""

    budget: int
    max_loaded: int | None = None
    min_stay_s: float = 30.0
    elsewhere: int = 0

    @property
    def stay_s(self) -> float:
        return max(self.min_stay_s, HANDOVER_S)


@dataclass(frozen=True, slots=True)
class Load:
    model: str


@dataclass(frozen=True, slots=True)
class Unload:
    """drains: it answers requests, and goes after them; else it stays if one has come meanwhile."""

    model: str
    reason: EvictionReason
    drains: bool = False


Action = Load | Unload


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and when to decide again if nothing else happens. short: bytes that the first want lacks,
    whatever this host gives up: other hosts of the machine have them."""

    actions: tuple[Action, ...] = ()
    again_at: float = inf
    short: int = 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """wait_s: expected until a model is ready for a request that comes now. position: loads before its own. evicts:
    others go for it."""

    wait_s: float
    position: int
    evicts: bool


def decide(models: Sequence[Seen], wants: Sequence[Want], limits: Limits, now: float) -> Decision:
    """wants: in the order in which they came, each of a model that is asleep."""
    wanted = {want.model for want in wants}
    going = [one for one in models if _idle(one) and one.goes_at <= now and one.name not in wanted]
    actions: list[Action] = [Unload(one.name, one.goes_for) for one in going]
    again = min((one.goes_at for one in models if _idle(one) and one.goes_at > now), default=inf)
    if going or any(one.state == "loading" for one in models):
        return Decision(tuple(actions), again)
    if sum(one.need for one in models if one.state in LOADED) > limits.budget:
        wants = (Want("", 0), *wants)  # a model takes more than was expected, or other hosts of the machine do
    for want in wants:
        room = _room(models, want, limits, now)
        if room.here:
            if want.model:
                return Decision((Load(want.model),), again)
        elif want.evicts:
            return Decision(room.actions, min(again, room.again_at), room.short)
    return Decision((), again)


def refusal(need: int, models: Iterable[Seen], limits: Limits, name: str) -> str:
    """Why a model can never be loaded; "" if it can."""
    pinned = [one for one in models if one.pinned and one.state in LOADED and one.name != name]
    held = sum(one.need for one in pinned)
    if need > limits.budget - held:
        return "memory" if need > limits.budget else "pinned memory"
    if limits.max_loaded is not None and len(pinned) >= limits.max_loaded:
        return "pinned places"
    return ""


def outlook(
    models: Sequence[Seen],
    wants: Sequence[Want],
    limits: Limits,
    now: float,
    load_s: Mapping[str, float],
) -> dict[str, Outlook]:
    """Of every model. load_s: what is left of its load if it loads, else what one takes."""
    found = {one.name: Outlook(0.0, 0, evicts=False) for one in models if one.state == "ready"}
    loading = [one for one in models if one.state == "loading"]
    at = sum(load_s[one.name] for one in loading)
    found |= {one.name: Outlook(load_s[one.name], 0, evicts=False) for one in loading}
    known = {one.name: one for one in models}
    position = len(loading)
    for want in wants:
        if want.model in known and want.model not in found:
            room = _room(models, want, limits, now)
            at = min(at + room.wait_s(now, limits) + load_s[want.model], NEVER_S)
            found[want.model] = Outlook(at, position, evicts=not room.here)
            position += 1
    for one in models:
        if one.name not in found:
            room = _room(models, Want(one.name, one.need), limits, now)
            wait_s = min(at + room.wait_s(now, limits) + load_s[one.name], NEVER_S)
            found[one.name] = Outlook(wait_s, position, evicts=not room.here)
    return found


@dataclass(frozen=True, slots=True)
class _Room:
    """here: there is room now. actions: what makes it. again_at: when more can go; inf: with what is going there is
    enough, or never (`enough`). short: bytes that are missing then."""

    here: bool = False
    actions: tuple[Unload, ...] = ()
    again_at: float = inf
    enough: bool = True
    short: int = 0

    def wait_s(self, now: float, limits: Limits) -> float:
        if not self.enough:
            return DRAIN_S if 0 < self.short <= limits.elsewhere else NEVER_S
        until_s = 0.0 if self.again_at == inf else max(0.0, self.again_at - now)
        return until_s + (DRAIN_S if any(one.drains for one in self.actions) else 0.0)


class _Lack:
    """What is missing for a model: bytes and places."""

    def __init__(self, models: Sequence[Seen], want: Want, limits: Limits) -> None:
        loaded = [one for one in models if one.state in LOADED and one.name != want.model]
        self.nbytes = sum(one.need for one in loaded) + want.need - limits.budget
        self.places = 0
        if limits.max_loaded is not None and want.model:
            self.places = len(loaded) + 1 - limits.max_loaded
        self.reason: EvictionReason = "room" if self.nbytes > 0 else "max_loaded"

    def __bool__(self) -> bool:
        return self.nbytes > 0 or self.places > 0

    def takes(self, one: Seen) -> None:
        self.nbytes -= one.need
        self.places -= 1


def _room(models: Sequence[Seen], want: Want, limits: Limits, now: float) -> _Room:
    lack = _Lack(models, want, limits)
    if not lack:
        return _Room(here=True)
    for one in models:
        if one.state == "draining":
            lack.takes(one)
    if not lack:
        return _Room()
    able = [one for one in models if one.state == "ready" and not one.pinned and one.name != want.model]
    idle = sorted((one for one in able if not one.busy), key=lambda one: one.used_at)
    old = [one for one in idle if one.ready_at + limits.stay_s <= now]
    young = sorted((one for one in idle if one not in old), key=lambda one: one.ready_at)
    busy = sorted((one for one in able if one.busy), key=lambda one: one.ready_at)
    reason, going = lack.reason, list[Unload]()
    for one in old:
        lack.takes(one)
        going.append(Unload(one.name, reason))
        if not lack:
            return _Room(actions=_needed(going, models, want, limits))
    for one in young:
        lack.takes(one)
        if not lack:
            return _Room(again_at=one.ready_at + limits.stay_s)
    latest = max((one.ready_at + limits.stay_s for one in young), default=-inf)
    for one in busy:
        lack.takes(one)
        latest = max(latest, one.ready_at + limits.stay_s)
        going.append(Unload(one.name, reason, drains=True))
        if not lack:
            return _Room(actions=tuple(going)) if latest <= now else _Room(again_at=latest)
    return _Room(enough=False, short=max(0, lack.nbytes) if lack.places <= 0 else 0)


def _needed(going: Sequence[Unload], models: Sequence[Seen], want: Want, limits: Limits) -> tuple[Unload, ...]:
    """Without those that may stay, since another one of these gives room enough."""
    kept = list(going)
    for one in going[:-1]:
        lack, rest = _Lack(models, want, limits), {other.model for other in kept if other is not one}
        for model in models:
            if model.name in rest or model.state == "draining":
                lack.takes(model)
        if not lack:
            kept.remove(one)
    return tuple(kept)


def _idle(one: Seen) -> bool:
    return one.state == "ready" and not one.busy and not one.pinned
