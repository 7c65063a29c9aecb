"""A client's view of its fleet: which hosts are up, how loaded they are, which ones fail. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from disagg.api.status import Load
from disagg.inference.hosts.affinity import Affinity
from disagg.inference.hosts.breaker import CLOSED, Breaker
from disagg.inference.hosts.places import HostPlaces

MISSES_UNTIL_DOWN = 2
REFUTED_ALONE: Final = 2
"""A decode host that refutes the KV of so many senders, which other decode hosts accept, is to blame itself."""
FULL: Final = 0.95  # of kv_limit: a new request waits for another's end
WAITED_FOR: Final = ("loading", "draining")
"""States of a host that end by themselves: a request waits for such a host if there is no other."""


@dataclass(frozen=True, slots=True)
class HostView:
    """One host. reachable: whether GET /load was answered lately; "unknown" until the first answer or miss. refused:
    the last miss was a refused connection: nothing listens on its port.

    load: its last answer, None if it has none. outstanding: this client's requests there, and their prompt tokens;
    `counted` of them were there when `load` was read, so that it may include them.
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

    def obstacle(self, now: float, *, despite_failures: bool = False) -> str:
        """Why the host gets no request now; empty if it may get one. despite_failures: those of earlier requests are no
        reason."""
        if self.reachable == "down":
            return "down"
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
        """Whether the host has answered this client at least once."""
        return self.load is not None or self.reachable == "up"

    @property
    def ahead(self) -> int:
        """Requests that a new one finds there, by the host's last answer and by what was sent since."""
        load = self.load
        if load is None:
            return self.outstanding
        return max(0, load.queue + load.running + self.outstanding - self.counted)

    @property
    def kv_is_full(self) -> bool:
        """Whether a new request waits for KV memory."""
        load = self.load
        return load is not None and load.kv_limit > 0 and load.kv_bytes > FULL * load.kv_limit

    @property
    def has_room(self) -> bool:
        """Whether the host would begin with a new request at once."""
        return self.ahead < (self.load.running_limit if self.load else 1) and not self.kv_is_full

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


@dataclass(slots=True)
class FleetView:
    """All hosts by name, what decode hosts hold, how many bytes of KV a token of each model has, and the places of this
    client's requests."""

    hosts: dict[str, HostView] = field(default_factory=dict)
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
