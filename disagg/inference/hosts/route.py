"""Which hosts may serve a request, best first, and why: `rank(view, request) -> Ranking`. Pure.

A host's cost is the seconds that the request is expected to spend there. Of many hosts a few are compared, beginning
at a random one, which spreads requests nearly as well as comparing them all (the power of two choices) and takes the
same time for 10 hosts and for 1,000. A host that has to load the model first costs the seconds of the load, and what
that costs others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from zlib import crc32

from msgspec import structs

from disagg.api.events import SlotEvent
from disagg.api.names import KV_CHUNKS, Role
from disagg.api.requests import MAX_DEADLINE_S, PrefillOffer, Share, Split
from disagg.api.status import Load
from disagg.config import Fleet, Host
from disagg.errors import ServerUnavailable
from disagg.inference.attempt import Alone
from disagg.inference.hosts.view import LASTING, LOAD, WAITED_FOR, FleetView, HostView

COMPARED = 6  # hosts of each role
PREFILL_TOKENS_S = 1000.0  # if no host has measured it; one that has not is taken for as fast as the fastest
DECODE_TOKENS_S = 30.0
SHARED_STEP = 0.5  # a full batch makes every step longer by about this share
HELD_CREDIT = 0.25  # at most this share of a host's cost: equal hosts measure speeds a third apart


@dataclass(frozen=True, slots=True)
class Candidates:
    """The hosts that serve a model, by role. A request that one host is to run alone has hosts of that role only.
    context: the model's, in tokens."""

    model: str
    decode: tuple[Host, ...]
    prefill: tuple[Host, ...]
    alone: Alone | None = None
    whole: tuple[Host, ...] = ()
    context: int = 0

    @property
    def all(self) -> tuple[Host, ...]:
        return (*self.decode, *self.prefill, *self.whole)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as routing sees it. held: tokens of its prompt, by the decode host that holds their KV. last_look: it
    fails if no host is found now, so that earlier failures leave no host out. share: whose share it counts for. split:
    how its prompt is to be divided."""

    candidates: Candidates
    prompt_tokens: int
    answer_tokens: int
    held: Mapping[str, int] = field(default_factory=dict)
    last_look: bool = False
    share: Share = field(default_factory=Share)
    split: Split = "auto"


@dataclass(slots=True)
class Choice:
    """A host that may get the request. costs: the parts of its cost in seconds, by what they are. credit_s: the seconds
    by which another host must be cheaper, because this one holds KV of the prompt."""

    host: Host
    costs: dict[str, float]
    held_tokens: int = 0
    credit_s: float = 0.0
    cost_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.cost_s = sum(self.costs.values())

    @property
    def turn(self) -> int:
        """Which of equal hosts is first, if the model would have to be loaded: all clients choose the same one."""
        return crc32(self.host.name.encode()) if LOAD in self.costs else 0

    @property
    def reason(self) -> str:
        parts = [f"{name} {seconds:.3f} s" for name, seconds in self.costs.items() if seconds >= 0.0005]
        held = [f"holds {self.held_tokens} tokens of the prompt"] if self.held_tokens else []
        return ", ".join(held + parts) or "idle"

    def to_json(self) -> dict[str, Any]:
        return {"host": self.host.name, "cost_s": self.cost_s, "costs_s": self.costs, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Ranking:
    """The hosts of each role, best first, and those that get no request now, with the reason. A fleet with more hosts
    than are compared has others, which are in neither. unseen: the names of all hosts, if none has ever answered;
    refused: those of them that have refused the last connection."""

    candidates: Candidates
    decode: tuple[Choice, ...]
    prefill: tuple[Choice, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    offer: PrefillOffer | None = None
    unseen: frozenset[str] = frozenset()
    whole: tuple[Choice, ...] = ()
    refused: frozenset[str] = frozenset()

    def waits_for(self, hosts: Iterable[Host]) -> str:
        """`dgx-1 is loading`, if one of these hosts gets no request now but will soon; else empty."""
        names = [host.name for host in hosts if self.left_out.get(host.name) in WAITED_FOR]
        return f"{names[0]} is {self.left_out[names[0]]}" if names else ""

    def cannot_serve(self, hosts: Iterable[Host]) -> bool:
        """Whether no wait for any of these hosts helps: their model is not on them, or cannot be loaded."""
        reasons = [self.left_out.get(host.name, "") for host in hosts]
        return bool(reasons) and all(reason.partition(":")[0] in LASTING for reason in reasons)

    def elsewhere_s(self, prefill: Host | None, view: FleetView) -> float | None:
        """Seconds in which another prefill host than this one is expected to deliver the KV; None if there is none that
        could go on if this one fails."""
        others = (choice for choice in self.prefill if choice.host != prefill and _follows(view, prefill, choice.host))
        return min((min(choice.cost_s, MAX_DEADLINE_S) for choice in others), default=None)

    def to_json(self) -> dict[str, Any]:
        """The ranking as `--explain --json` prints it."""
        return {
            "decode": [choice.to_json() for choice in self.decode],
            "prefill": [choice.to_json() for choice in self.prefill],
            "whole": [choice.to_json() for choice in self.whole],
            "left_out": dict(self.left_out),
        }


def candidates(fleet: Fleet, model: str, alone: Alone | None = None) -> Candidates:
    """The hosts of a model, by name or alias. One without decode hosts is served by whole-request hosts alone.

    Raises UnknownModel, and ServerUnavailable if no host of the model has the role that must answer.
    """
    served = fleet.model(model)
    name = served.name
    roles: tuple[Role, ...] = ("decode", "prefill", "whole")
    by_role = {role: tuple(fleet.serving(name, role)) for role in roles}
    if alone is None and by_role["whole"] and not by_role["decode"]:
        alone = "whole"
    if not by_role[alone or "decode"]:
        raise ServerUnavailable(f"no {alone or 'decode'} host serves {name}", "add one to hosts.toml")
    chosen = {role: hosts if alone in (None, role) else () for role, hosts in by_role.items()}
    if alone and not any(host.answers for host in chosen[alone]):
        reason = f"every {alone} host of {name} has the first layers of the model only, and answers nothing alone"
        raise ServerUnavailable(reason, "see docs/split-prefill.md")
    return Candidates(name, chosen["decode"], chosen["prefill"], alone, chosen["whole"], served.context)


def rank(view: FleetView, request: RouteRequest, now: float, start: int) -> Ranking:
    """The hosts for a request, best first. start: a random number; equal hosts are ranked in turn beginning there."""
    hosts = request.candidates
    look = _Look(view, now, start, request.last_look, {})
    computing = _with_its_layers(look, _compared(look, hosts.prefill, ()), request.split)
    speed = _fastest([load.prefill_tokens_s for load in _loads(view, computing)], PREFILL_TOKENS_S)
    prefill = [_prefill_choice(view, host, request, speed) for host in computing]
    prefill.sort(key=_cost)
    answering = _compared(look, hosts.decode, request.held)
    answer_speed = _fastest([load.decode_tokens_s for load in _loads(view, answering)], DECODE_TOKENS_S)
    decode = [_decode_choice(view, host, request, speed, answer_speed) for host in answering]
    decode.sort(key=_rank_of_decode)
    if prefill and decode:
        _add_transfer(view, prefill, decode[0], request)
    whole = [
        _whole_choice(view.of(host.name), host, request.answer_tokens) for host in _compared(look, hosts.whole, ())
    ]
    whole.sort(key=_cost)
    offer = offer_of(view, prefill[0], decode[0].host) if prefill and decode else None
    unseen = _unseen(view, hosts)
    refused = frozenset(name for name in unseen if view.of(name).refused)
    return Ranking(hosts, tuple(decode), tuple(prefill), look.left_out, offer, unseen, tuple(whole), refused)


def unknown(view: FleetView, request: RouteRequest, now: float, start: int) -> list[Host]:
    """Of the hosts that `rank` compares, those whose load was not read yet, if the loads decide what they are asked
    for: whether a prompt is divided between two of them."""
    hosts, look = request.candidates, _Look(view, now, start, request.last_look, {})
    if hosts.alone or not (hosts.decode and hosts.prefill):
        return []
    compared = [*_compared(look, hosts.prefill, ()), *_compared(look, hosts.decode, request.held)]
    return [host for host in compared if view.of(host.name).load is None and not view.of(host.name).must_load]


def _with_its_layers(look: _Look, hosts: list[Host], split: Split) -> list[Host]:
    """Of these prefill hosts, those with the layers that a prompt is to be divided so for; all if none has them: the
    decode host then says what is missing."""
    missing = {host.name: reason for host in hosts if (reason := _missing(look.view.of(host.name).load, split))}
    able = [host for host in hosts if host.name not in missing]
    if not able:
        return hosts
    look.left_out.update(missing)
    return able


def _missing(load: Load | None, split: Split) -> str:
    """Why a prefill host has not the layers that it would compute; empty if it has."""
    if load is None or load.layers is None:
        return ""
    has = f"has the model's first {load.layers} layers"
    if isinstance(split, int):
        return f"{has}, and {split} are asked for" if split > load.layers else ""
    return has if split == "off" or not load.splits else ""


def _unseen(view: FleetView, hosts: Candidates) -> frozenset[str]:
    """The names of all hosts, if none of them has ever answered this client."""
    if any(view.of(host.name).has_answered for host in hosts.all):
        return frozenset()
    return frozenset(host.name for host in hosts.all)


def _cost(choice: Choice) -> tuple[float, int]:
    return choice.cost_s, choice.turn


def _rank_of_decode(choice: Choice) -> tuple[float, int]:
    """A conversation moves only to a host that is cheaper by more than its KV is worth there: it leaves that behind."""
    return choice.cost_s - choice.credit_s, choice.turn


class _Look(NamedTuple):
    """One look at the fleet. left_out: collects the hosts that get no request now."""

    view: FleetView
    now: float
    start: int
    last: bool
    left_out: dict[str, str]

    def obstacle(self, host: Host) -> str:
        """Why the host gets no request now; empty if it may get one."""
        return self.view.obstacle(host, self.now, despite_failures=self.last)


def _compared(look: _Look, hosts: Sequence[Host], held: Iterable[str]) -> list[Host]:
    """The first hosts from `start` on that may get a request, and those that hold a part of its prompt."""
    found = list[Host]()
    count = len(hosts)
    for number in range(count):
        host = hosts[(look.start + number) % count]
        if obstacle := look.obstacle(host):
            look.left_out[host.name] = obstacle
            continue
        found.append(host)
        if len(found) == COMPARED:
            break
    if held and count > COMPARED:
        names = {host.name for host in found}
        holders = [host for host in hosts if host.name in held and host.name not in names]
        found += [host for host in holders if not look.obstacle(host)]
    return found


def _loads(view: FleetView, hosts: Iterable[Host]) -> Iterator[Load]:
    for host in hosts:
        if (load := view.of(host.name).load) is not None:
            yield load


def _fastest(measured: Sequence[float | None], default: float) -> float:
    return max((speed for speed in measured if speed), default=default)


def _prefill_choice(view: FleetView, host: Host, request: RouteRequest, speed: float) -> Choice:
    seen = view.of(host.name)
    speed = (seen.load.prefill_tokens_s if seen.load else None) or speed
    ahead = view.places.tokens_ahead(host.name, request.share, seen.tokens_ahead)
    costs = {"queue": ahead / speed, "compute": request.prompt_tokens / speed}
    return Choice(view.addressed(host), costs | view.loading_costs(host))


def _whole_choice(seen: HostView, host: Host, answer_tokens: int) -> Choice:
    """A whole-request host states nothing about itself: only this client's own requests there are known."""
    return Choice(host, {"answer": answer_tokens / DECODE_TOKENS_S * (1 + SHARED_STEP * seen.outstanding)})


def _decode_choice(view: FleetView, host: Host, request: RouteRequest, prefill_speed: float, speed: float) -> Choice:
    seen = view.of(host.name)
    load, ahead = seen.load, seen.ahead
    answer_s = request.answer_tokens / ((load.decode_tokens_s if load else None) or speed)
    limit = max(1, load.running_limit if load else host.engine.max_batch)
    waiting = max(0, ahead + 1 - limit)
    held = min(request.held.get(host.name, 0), request.prompt_tokens)
    costs = {
        "queue": answer_s * waiting / limit,
        "KV memory": answer_s / limit if seen.kv_is_full else 0.0,
        "prompt": (request.prompt_tokens - held) / prefill_speed,
        "answer": answer_s * (1 + SHARED_STEP * min(ahead, limit) / limit),
    }
    credit_s = min(HELD_CREDIT * sum(costs.values()), held / prefill_speed)
    return Choice(view.addressed(host), costs | view.loading_costs(host), held, credit_s)


def _add_transfer(view: FleetView, prefill: list[Choice], decode: Choice, request: RouteRequest) -> None:
    """Add to each prefill host what its link to the best decode host is too slow to hide, and rank them again."""
    size = view.kv_bytes_per_token.get(request.candidates.model)
    if size is None:
        return
    nbytes = size * (request.prompt_tokens - decode.held_tokens)
    for choice in prefill:
        if rate := _link(view, choice.host, decode.host):
            choice.costs["transfer"] = max(0.0, nbytes / rate - choice.costs["compute"])
            choice.cost_s = sum(choice.costs.values())
    prefill.sort(key=_cost)


def _link(view: FleetView, prefill: Host, decode: Host) -> float | None:
    """Measured rate between two hosts in bytes/s, None if not measured."""
    load = view.of(prefill.name).load
    return load.links.get(f"{decode.kv_address}:{decode.kv_port}") if load and load.links else None


def offer_of(view: FleetView, prefill: Choice, decode: Host, *, alone: bool = True) -> PrefillOffer | None:
    """The prefill host as POST /decode states it; None if nothing is known of that. alone: the decode host may compute
    all of the prompt itself.

    A decode host of an earlier version knows no other offers than those of a measured speed, to compare its own with.
    """
    load, seen = view.of(prefill.host.name).load, view.of(decode.name).load
    divides = seen is not None and seen.kv_version >= KV_CHUNKS
    if load is None or not (divides or (alone and load.prefill_tokens_s)):
        return None
    offer = PrefillOffer(
        wait_s=min(prefill.costs["queue"], MAX_DEADLINE_S),
        tokens_s=load.prefill_tokens_s or None,
        link_bytes_s=_link(view, prefill.host, decode) or None,
    )
    if not divides:
        return offer
    more = {"splits": load.splits, "layers": load.layers, "kv_version": load.kv_version, "alone": alone}
    return structs.replace(offer, speeds=load.prefill_speeds, **more)


def _follows(view: FleetView, first: Host | None, other: Host) -> bool:
    """Whether `other` can go on with every prompt that `first` may have begun: of an earlier version, which leaves
    nothing to go on with, any host can."""
    begun, load = view.of(first.name).load if first is not None else None, view.of(other.name).load
    if begun is None or begun.kv_version < KV_CHUNKS:
        return True
    if load is None or load.kv_version < begun.kv_version or (begun.splits and not load.splits):
        return False
    return load.layers is None or (begun.layers is not None and load.layers >= begun.layers)


def can_go_on(view: FleetView, host: Host, slot: SlotEvent) -> bool:
    """Whether this prefill host can send what a slot is for, though it was opened for another one."""
    load = view.of(host.name).load
    if load is None or load.kv_version < slot.kv_version:
        return False
    if slot.layers is None:
        return load.layers is None
    return load.splits and (load.layers is None or load.layers >= slot.layers)
