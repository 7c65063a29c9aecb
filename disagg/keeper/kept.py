"""One model of a host, as its keeper keeps it, and what that is to others: to `policy`, to callers, to other hosts."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Final

from disagg.api.keeper import FOR_EVER_S, EvictionReason, KeptModel, LoadEvent, MemoryClaim, ModelState
from disagg.config import Host, KeeperSettings, Model
from disagg.keeper.child import Child, Patience
from disagg.keeper.policy import Outlook, Seen
from disagg.keeper.weights import Files
from disagg.ledger import Claimed, source_of

MAX_REASON: Final = 2000  # characters, as KeptModel has it
COME_S: Final = 2.0
"""For those who asked for a model to send their request."""
NO_FILES: Final = Files()
_START_S, _READ_BYTES_S = 3.0, 1e9
"""What a load is expected to take that was never measured: assumed."""


@dataclass(slots=True)
class Kept:
    """A model of the host. ports: for HTTP, and for KV if it decodes. going: why its process was told to go. asked_at:
    when somebody last asked for its load. keep_alive_s, asked_pin: as asked for; None: as hosts.toml says. faults: how
    often those who waited for it were told that it fails. waiting: those who do now. config: what hosts.toml stated of
    it when its process was started, and states now, as served_digest has it."""

    host: Host
    model: Model
    ports: tuple[int, ...]
    files: Files = NO_FILES
    need: int = 0
    child: Child | None = None
    going: EvictionReason | None = None
    killed_at: float = inf
    pinned: bool = False
    asked_pin: bool | None = None
    removed: bool = False
    keep_alive_s: float | None = None
    ready_at: float = -inf
    used_at: float = -inf
    asked_at: float = -inf
    waiting: int = 0
    requests: int = 0
    loads: int = 0
    load_s: float | None = None
    evictions: dict[EvictionReason, int] = field(default_factory=dict)
    tries: int = 0
    not_before: float = -inf
    failed: str = ""
    failed_at: float = -inf
    faults: int = 0
    claim: Claimed | None = None
    config: str = ""
    started_config: str = ""

    @property
    def outdated(self) -> bool:
        """Whether its process is of an earlier configuration, or of a model that is listed no more."""
        return self.child is not None and (self.removed or self.config != self.started_config)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def state(self) -> ModelState:
        if self.child is not None:
            if self.going or (self.child.report is not None and self.child.report.load.status == "draining"):
                return "draining"
            return "ready" if self.child.loaded else "loading"
        if self.failed:
            return "failed"
        return "absent" if self.files.reason else "asleep"

    @property
    def occupied(self) -> bool:
        return self.child is not None and self.child.occupied

    @property
    def source(self) -> str:
        """See source_of."""
        return source_of(self.host, self.model)

    def goes_at(self, settings: KeeperSettings) -> float:
        """When it goes if it stays idle."""
        keep_s = settings.idle_ttl_s if self.keep_alive_s is None else self.keep_alive_s
        if keep_s is None or keep_s == FOR_EVER_S or self.pinned or self.waiting:
            return inf
        return max(max(self.used_at, self.ready_at) + keep_s, max(self.ready_at, self.asked_at) + COME_S)

    def left_s(self, now: float) -> float:
        """What is left of its load, or what one takes."""
        whole_s = self.load_s or _START_S + self.files.nbytes / _READ_BYTES_S
        if self.child is None or self.child.loaded:
            return whole_s
        gone_s = now - self.child.started
        return max(whole_s - gone_s, gone_s / 10)

    def seen(self, settings: KeeperSettings) -> Seen:
        """As `policy` sees it."""
        return Seen(
            self.name,
            self.state,
            self.need,
            busy=self.child is not None and self.child.occupied,
            pinned=self.pinned,
            ready_at=self.ready_at,
            used_at=max(self.used_at, self.ready_at),
            goes_at=self.goes_at(settings),
            goes_for="asked" if self.keep_alive_s == 0 else "idle",
        )

    def claim_of(self, pool: str) -> MemoryClaim:
        """As the other hosts of the machine see it."""
        return MemoryClaim(
            host=self.host.table,
            model=self.name,
            source=self.source,
            nbytes=self.need,
            pool=pool,
            stays=self.pinned,
            leaves=self.state == "draining",
        )

    def stated(self, ahead: Outlook | None, settings: KeeperSettings, now: float, patience: Patience) -> KeptModel:
        """As the keeper states it."""
        child, goes_at = self.child, self.goes_at(settings)
        reason = child.silence(now, patience) if child is not None else self.files.reason
        load = child.report.load if child is not None and child.report is not None else None
        return KeptModel(
            model=self.name,
            state=self.state,
            port=self.ports[0],
            kv_port=self.ports[1] if len(self.ports) > 1 else None,
            wait_s=ahead.wait_s if ahead is not None else 0.0,
            evicts=ahead is not None and ahead.evicts,
            need_bytes=self.need,
            read_bytes=self._read_bytes,
            total_bytes=self.files.nbytes,
            running=load.running if load is not None else 0,
            waiting=self.waiting + (load.queue if load is not None else 0),
            pinned=self.pinned,
            reason=(self.failed or reason)[:MAX_REASON],
            expires_s=max(0.0, goes_at - now) if self.state == "ready" and goes_at < inf else None,
            used_s=now - self.used_at if self.used_at > -inf else None,
            loads=self.loads,
            load_s=self.load_s,
            evictions={reason: count for reason, count in self.evictions.items() if count},
            pid=child.pid if child is not None else None,
            resident_bytes=child.resident if child is not None else 0,
            facts=self.files.facts,
        )

    def event(self, ahead: Outlook | None) -> LoadEvent:
        """What those who wait for it are told."""
        return LoadEvent(
            model=self.name,
            state=self.state,
            position=ahead.position if ahead is not None else 0,
            read_bytes=self._read_bytes,
            total_bytes=self.files.nbytes,
            left_s=ahead.wait_s if ahead is not None and self.state != "ready" else 0.0,
            port=self.ports[0],
            kv_port=self.ports[1] if len(self.ports) > 1 else None,
        )

    @property
    def _read_bytes(self) -> int:
        return 0 if self.child is None else min(self.child.read_bytes, self.files.nbytes)
