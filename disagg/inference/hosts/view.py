"""A client's view of its fleet: which hosts are up, how loaded they are, which ones fail, and which models of a host
with several are loaded there. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from operator import itemgetter
from typing import Final, Literal

from msgspec import structs

from disagg.api.keeper import KeptModel, LoadEvent
from disagg.api.status import Load
from disagg.config import Host
from disagg.inference.hosts.affinity import Affinity
from disagg.inference.hosts.breaker import CLOSED, Breaker
from disagg.inference.hosts.places import HostPlaces

MISSES_UNTIL_DOWN = 2
REFUTED_ALONE: Final = 2
"""A decode host that refutes the KV of so many senders, which other decode hosts accept, is to blame itself."""
FULL: Final = 0.95  # of kv_limit: a new request waits for another's end
WAITED_FOR: Final = ("loading", "draining")
"""States of a host that end by themselves: a request waits for such a host if there is no other."""
LASTING: Final = ("absent", "failed")
"""States of a model on a host in which no request waits for it."""
LOAD: Final = "another load"
"""The part of a host's cost that a load costs others which a request would begin."""
LATELY_S: Final = 30.0
"""A model that was used so long ago counts half as much more as one that was used just now."""
LEAST_LOAD_S: Final = 1.0
"""What a load takes at least: no process starts in less."""


@dataclass(frozen=True, slots=True)
class HostView:
    """One host. reachable: whether GET /load was answered lately; "unknown" until the first answer or miss. refused:
    the last miss was a refused connection: nothing listens on its port.

    load: its last answer, None if it has none. outstanding: this client's requests there, and their prompt tokens;
    `counted` of them were there when `load` was read, so that it may include them.

    kept: of a model of a host with several, what its keeper has stated last; woken: this client waits for its load.
    """

    reachable: Literal["unknown", "up", "down"] = "unknown"
    misses: int = 0
    refused: bool = False
    load: Load | None = None
    outstanding: int = 0
    outstanding_tokens: int = 0
    counted: int = 0
    counted_tokens: int = 0
    breaker: Breaker = CLOSED
    kept: KeptModel | None = None
    woken: int = 0

    def obstacle(self, now: float, *, despite_failures: bool = False) -> str:
        """Why the host gets no request now; empty if it may get one. despite_failures: those of earlier requests are no
        reason."""
        if self.reachable == "down":
            return "down"
        if self.kept is not None and self.kept.state in LASTING:
            return f"{self.kept.state}: {self.kept.reason}" if self.kept.reason else self.kept.state
        if self.load is not None and self.load.status != "ok":
            return self.load.status
        if despite_failures:
            return ""
        if (self.breaker.ejections or self.breaker.probing) and (seconds := self.breaker.closed_for(now)) > 0:
            return f"failed lately: left out for {seconds:.1f} s"
        return ""

    @property
    def boot_id(self) -> str:
        """The id of the server's start that answered last; empty if none has."""
        return self.load.boot_id if self.load is not None else ""

    @property
    def has_answered(self) -> bool:
        """Whether the host, or the keeper of its model, has answered this client at least once."""
        return self.load is not None or self.reachable == "up" or self.kept is not None

    @property
    def must_load(self) -> bool:
        """Whether the host's model has to be loaded before a request can begin there."""
        return self.kept is not None and self.kept.state != "ready"

    @property
    def loads(self) -> bool:
        """Whether it is being loaded, as far as is known."""
        return self.must_load and (self.woken > 0 or (self.kept is not None and self.kept.state == "loading"))

    @property
    def ahead(self) -> int:
        """Requests that a new one finds there, by the host's last answer and by what was sent since."""
        load = self.load
        if load is None:
            return self.outstanding + self.woken
        return max(0, load.queue + load.running + self.outstanding - self.counted)

    @property
    def kv_is_full(self) -> bool:
        """Whether a new request waits for KV memory."""
        load = self.load
        return load is not None and load.kv_limit > 0 and load.kv_bytes > FULL * load.kv_limit

    @property
    def has_room(self) -> bool:
        """Whether the host would begin with a new request at once."""
        return not self.must_load and self.ahead < (self.load.running_limit if self.load else 1) and not self.kv_is_full

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that are computed before those of a new request."""
        if self.load is None:
            return self.outstanding_tokens
        return max(0, self.load.queue_tokens + self.outstanding_tokens - self.counted_tokens)

    def answered(self, load: Load | None) -> HostView:
        """The host answered GET /load; None: without figures, as a host of another version does."""
        restarted = self.restarted(load)
        return replace(
            self,
            reachable="up",
            misses=0,
            refused=False,
            load=load,
            counted=self.outstanding,
            counted_tokens=self.outstanding_tokens,
            breaker=CLOSED if restarted else self.breaker,
        )

    def restarted(self, load: Load | None) -> bool:
        """Whether `load` comes from another start of the server than the last one."""
        return load is not None and self.load is not None and load.boot_id != self.load.boot_id

    def stated(self, kept: KeptModel) -> HostView:
        """The keeper of the host's model states this of it. What its process has stated is void without it."""
        if kept.state == "ready":
            return replace(self, kept=kept)
        return replace(self, kept=kept, reachable="up", misses=0, refused=False, load=None)

    def missed(self, *, refused: bool = False) -> HostView:
        """The host did not answer GET /load in time."""
        misses = self.misses + 1
        reachable = "down" if misses >= MISSES_UNTIL_DOWN else self.reachable
        return replace(self, misses=misses, refused=refused, reachable=reachable)

    def began(self, tokens: int) -> HostView:
        """A request with so many prompt tokens was sent to the host."""
        return replace(
            self,
            outstanding=self.outstanding + 1,
            outstanding_tokens=self.outstanding_tokens + tokens,
            breaker=self.breaker.began(),
        )

    def done(self, tokens: int) -> HostView:
        """The host has nothing more to do for that request."""
        return replace(
            self,
            outstanding=max(0, self.outstanding - 1),
            outstanding_tokens=max(0, self.outstanding_tokens - tokens),
        )

    def ended(self, tokens: int, breaker: Breaker) -> HostView:
        """That request has ended."""
        return replace(self.done(tokens), breaker=breaker)


UNKNOWN: Final = HostView()


@dataclass(frozen=True, slots=True)
class Room:
    """A host with several models. hosts: the names of one host per model. free_bytes: what its models may take besides
    those that are loaded or loading, or that this client waits for; negative if these will not fit together."""

    hosts: tuple[str, ...]
    free_bytes: int


def _idle_s(seen: HostView) -> float:
    """For how long a model has not been used, as far as is known."""
    if seen.kept is None or seen.outstanding or seen.kept.running or seen.kept.waiting:
        return 0.0
    return inf if seen.kept.used_s is None else seen.kept.used_s


@dataclass(slots=True)
class FleetView:
    """All hosts by name, what decode hosts hold, how many bytes of KV a token of each model has, and the places of this
    client's requests. rooms: of the hosts with several models, by name."""

    hosts: dict[str, HostView] = field(default_factory=dict)
    rooms: dict[str, Room] = field(default_factory=dict)
    affinity: Affinity = field(default_factory=Affinity)
    kv_bytes_per_token: dict[str, float] = field(default_factory=dict)
    places: HostPlaces = field(default_factory=HostPlaces)

    def of(self, name: str) -> HostView:
        return self.hosts.get(name, UNKNOWN)

    def vocab_size(self, answering: str, others: Iterable[str]) -> int:
        """The most tokens that a model has, as the other hosts of it state; 0 if none does. What a host states of
        itself limits it no further than what it sends."""
        sizes = [view.load.vocab_size for name in others if (view := self.of(name)).load and name != answering]
        return max(sizes, default=0)

    def answered(self, name: str, load: Load | None) -> None:
        """A host answered GET /load. If it has restarted, what it held is dropped from the view."""
        if self.of(name).restarted(load):
            self.affinity.forget(name)
        self.hosts[name] = self.of(name).answered(load)

    def missed(self, name: str, *, refused: bool = False) -> None:
        """A host did not answer GET /load in time. refused: it refused the connection."""
        self.hosts[name] = self.of(name).missed(refused=refused)
        for one in self.rooms[name].hosts if name in self.rooms else ():
            if self.of(one).must_load:
                self._follow(one, name)

    def obstacle(self, host: Host, now: float, *, despite_failures: bool = False) -> str:
        """Why a host gets no request now; empty if it may get one. See HostView."""
        seen = self.of(host.name)
        if not host.keeper or seen.kept is not None:
            return seen.obstacle(now, despite_failures=despite_failures)
        keeper = self.of(host.keeper)
        if keeper.reachable == "up":
            return "not among the models of its host: run `disagg deploy`"
        return "down" if keeper.reachable == "down" else "not asked yet"

    def keeper_answered(self, keeper: str, load: Load) -> None:
        """The keeper of a host with several models answered GET /load."""
        self.answered(keeper, load)
        stated = {f"{keeper}/{kept.model}": kept for kept in load.models}
        for name in self.rooms[keeper].hosts if keeper in self.rooms else ():
            if name not in stated:
                self.hosts[name] = replace(self.of(name), kept=None)
        woken = [kept for name, kept in stated.items() if self.of(name).woken and kept.state == "asleep"]
        free = load.budget_bytes - load.used_bytes - sum(kept.need_bytes for kept in woken)
        self.rooms[keeper] = Room(tuple(stated), free)
        self.models_stated(keeper, load.models)

    def models_stated(self, keeper: str, models: Iterable[KeptModel]) -> None:
        """The keeper stated this of its models."""
        for kept in models:
            self._stated(f"{keeper}/{kept.model}", kept)

    def load_event(self, host: Host, event: LoadEvent) -> None:
        """The keeper of the host states how far the load of its model is."""
        if (kept := self.of(host.name).kept) is not None:
            fields = {"state": event.state, "wait_s": event.left_s, "port": event.port, "kv_port": event.kv_port}
            self._stated(host.name, structs.replace(kept, **fields))

    def _stated(self, name: str, kept: KeptModel) -> None:
        if kept.state != "ready":
            self.affinity.forget(name)
        self.hosts[name] = self.of(name).stated(kept)

    def follow_keeper(self, host: Host) -> None:
        """A model without a process is reached as far as its keeper is."""
        self._follow(host.name, host.keeper)

    def _follow(self, name: str, keeper: str) -> None:
        seen = self.of(keeper)
        self.hosts[name] = replace(self.of(name), reachable=seen.reachable, misses=seen.misses, refused=seen.refused)

    def addressed(self, host: Host) -> Host:
        """The host with the ports at which its model answers: a keeper gives them to it."""
        kept = self.of(host.name).kept
        if kept is None or (host.port, host.kv_port) == (kept.port, kept.kv_port):
            return host
        return replace(host, port=kept.port, kv_port=kept.kv_port)

    def until_begun(self, host: Host, now: float) -> tuple[bool, float]:
        """Whether the host gets no request now, and the seconds that the load of its model counts for."""
        return bool(self.obstacle(host, now)), sum(self.loading_costs(host).values())

    def wakes(self, host: Host, change: int) -> None:
        """One more, or one less, of this client's requests waits until the host's model is loaded."""
        seen, room = self.of(host.name), self.rooms.get(host.keeper)
        begins = change > 0 and not seen.woken and seen.kept is not None and seen.kept.state == "asleep"
        if begins and seen.kept is not None and room is not None:
            self.rooms[host.keeper] = replace(room, free_bytes=room.free_bytes - seen.kept.need_bytes)
        self.hosts[host.name] = replace(seen, woken=max(0, seen.woken + change))

    def loading_costs(self, host: Host) -> dict[str, float]:
        """What a request would wait there for its model, in seconds, and what its load costs others: the load itself,
        unless it has begun, and that of a model that has to go for it, which is loaded again some time."""
        seen, room = self.of(host.name), self.rooms.get(host.keeper)
        if seen.kept is None or not seen.must_load:
            return {}
        wait_s = max(seen.kept.wait_s, LEAST_LOAD_S)
        if seen.loads:
            return {"loading": wait_s}
        costs = {"loading": wait_s, LOAD: seen.kept.load_s or wait_s}
        if seen.kept.evicts or (room is not None and seen.kept.need_bytes > room.free_bytes):
            costs["loading what goes"] = self._reload_s(room, wait_s)
        return costs

    def _reload_s(self, room: Room | None, unknown_s: float) -> float:
        """What the model that would go there costs: its load, and once more if it was used just now, since it is asked
        for again then. Of several hosts the one goes first whose models have not been used for the longest time."""
        there = [self.of(name) for name in (room.hosts if room is not None else ())]
        ready = [(_idle_s(seen), seen.kept.load_s) for seen in there if seen.kept and seen.kept.state == "ready"]
        idle_s, load_s = max(ready, default=(0.0, None), key=itemgetter(0))
        return (load_s or unknown_s) * (1 + LATELY_S / (LATELY_S + idle_s))

    def began(self, name: str, tokens: int) -> float:
        """A request was sent to the host; `ended` follows. Returns the `ejection` of its breaker's events."""
        self.hosts[name] = view = self.of(name).began(tokens)
        return view.breaker.until

    @property
    def verdicts(self) -> list[Load]:
        """What hosts state of requests that have ended hosts; empty if none has a strike."""
        loads = [view.load for view in self.hosts.values() if view.load is not None]
        return loads if any(load.strikes for load in loads) else []

    def sent(self, name: str, tokens: int) -> None:
        """A prefill host has sent its KV. If its KV was refuted before, `judged` says whether it was right."""
        view = self.of(name).done(tokens)
        self.hosts[name] = view if view.breaker.refuted else replace(view, breaker=view.breaker.succeeded())

    def judged(self, name: str, breaker: Breaker) -> None:
        """What the host showed while the request goes on, or came of its KV."""
        self.hosts[name] = replace(self.of(name), breaker=breaker)

    def refutes_alone(self, decode: str, sender: str) -> bool:
        """Whether a decode host that has just refuted the KV of this sender is itself to blame: it has refuted the KV
        of two senders that other decode hosts accept."""
        load = self.of(decode).load
        stated = load.senders if load is not None else {}
        refuted = {sender, *(name for name, one in stated.items() if one.verdict == "refuted")}
        others = [view.load.senders for name, view in self.hosts.items() if name != decode and view.load is not None]
        accepted = {name for senders in others for name, one in senders.items() if one.verdict == "accepted"}
        return sender in accepted and len(refuted & accepted) >= REFUTED_ALONE

    def ended(self, name: str, tokens: int, breaker: Breaker) -> None:
        """The request has ended there. breaker: the host's, after what it showed."""
        self.hosts[name] = self.of(name).ended(tokens, breaker)
