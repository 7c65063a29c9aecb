"""What a server states about itself: GET /health, /load and /status, its counters, and when to ask again."""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypeVar

import psutil
from msgspec import structs

from disagg.api.names import KV_CHUNKS, Role
from disagg.api.requests import PromptSpeed
from disagg.api.status import (
    Counters,
    DeviceUse,
    Health,
    LastError,
    Load,
    Memory,
    PendingRelease,
    SenderAudits,
    ServerState,
    Status,
)
from disagg.config import Fleet, Host, Model, served_digest
from disagg.engines.base import EngineInfo, PrefillEngine
from disagg.engines.decoding import DecodeEngine
from disagg.errors import DisaggError, ServerUnavailable
from disagg.planning.verdicts import verified
from disagg.servers.host.admission import Admission, retry_after
from disagg.servers.host.health import EngineHealth, EngineProgress
from disagg.servers.host.record import RequestRecord
from disagg.servers.host.request import Caller
from disagg.servers.host.work import RequestWork
from disagg.version import RELEASE_VARIABLE, VERSION, code_hash, pending_release

COMPUTED = frozenset({"sending KV", "generating"})
"""Phases in which a request's prompt is computed."""
AFTER_START_S = 5
"""What callers of a server that loads or drains wait."""

Engine = TypeVar("Engine", bound=PrefillEngine | DecodeEngine)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a role has and has measured lately. kv_bytes: KV of requests that the host holds now; kv_limit: its bound,
    0 if there is none. kv_held_bytes: KV of finished requests, given up if a request needs the room. queue_tokens:
    prompt tokens of admitted requests that are not computed yet. prefill_tokens_s, decode_tokens_s: prompt tokens per
    second, and answer tokens of one request. prefill_speeds: of prompts of different lengths. links: bytes/s of
    recent transfers from this host, by "address:port" of the decode host. senders: what audits of received KV found, by
    the name of the prefill host. audit_every: one hand-off in so many is audited; 0: none is."""

    kv_bytes: int
    kv_limit: int = 0
    kv_held_bytes: int = 0
    queue_tokens: int = 0
    prefill_tokens_s: float | None = None
    prefill_speeds: Sequence[PromptSpeed] = ()
    decode_tokens_s: float | None = None
    links: Mapping[str, float] = field(default_factory=dict)
    senders: Mapping[str, SenderAudits] = field(default_factory=dict)
    audit_every: int = 0


class ReportingHost(ABC, Generic[Engine]):
    """One host's server as it reports itself. A role overrides the figures that it has."""

    role: ClassVar[Role]

    def __init__(self, fleet: Fleet, host: Host, admission: Admission) -> None:
        self.fleet = fleet
        self.host = host
        self.state: Literal["loading", "ok", "draining"] = "loading"
        self.boot_id = secrets.token_hex(8)
        self.progress = EngineProgress()
        self.stalled = False  # set by the monitor
        self.work = RequestWork()
        self.record = RequestRecord(host.name)  # `serve` sets one with a file
        self.active: dict[str, Caller] = {}  # of every request from its arrival to its end, by the request's key
        self._started = time.monotonic()
        self.engine_health = EngineHealth(self._started)
        self._engine: Engine | None = None
        self._admission = admission
        self._counters = Counters()
        self._last_error: LastError | None = None
        self._request_s = 1.0  # how long recent requests took, from arrival to end

    @property
    def model(self) -> Model:
        return self.fleet.models[self.host.model]

    @property
    def info(self) -> EngineInfo | None:
        """The engine's description of itself, None until it is loaded."""
        return self._engine.info if self._engine else None

    @property
    def engine_alive(self) -> bool:
        """False once a loaded engine cannot serve any more."""
        return True

    @property
    def engine_failure(self) -> str:
        """Why it cannot, as the engine states it; empty if it does not."""
        return ""

    @abstractmethod
    def figures(self) -> Figures:
        """What this role has and has measured."""

    @property
    def kv_version(self) -> int:
        """The latest version of the KV protocol that this host uses."""
        return KV_CHUNKS

    @property
    def split_refusal(self) -> str:
        """Why this host computes no prompt together with another one, each some of the layers; empty if it does, or has
        not loaded."""
        if self.info is None or self.info.split.refusal:
            return self.info.split.refusal if self.info else ""
        title = self.host.engine.kind.title
        return "" if self.kv_version >= KV_CHUNKS else f"{title} sends the KV of all layers"

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of admitted requests that are not computed yet."""
        requests = [caller.request for caller in self.active.values() if caller.phase not in COMPUTED]
        return sum(len(request.tokens) for request in requests if request is not None)

    @property
    def busy(self) -> bool:
        """Whether the engine has work, so that its beats must go on. Engines without beats have none."""
        return False

    @property
    def occupied(self) -> bool:
        """Whether a request, or a count of tokens, has a place here."""
        return bool(self.active) or self._admission.queued + self._admission.running > 0

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def queue_s(self) -> float:
        """Seconds until the queue has moved on by one place per waiting request."""
        return self._request_s * self._admission.queued / self._admission.running_limit

    @property
    def retry_after_s(self) -> int:
        """When a refused caller may find a place."""
        return retry_after(self.queue_s if self.state == "ok" else AFTER_START_S)

    def load_figures(self) -> Load:
        """The answer of GET /load."""
        verdicts, figures = self.record.verdicts, self.figures()
        return Load(
            status=self.health_state,
            boot_id=self.boot_id,
            queue=self._admission.queued,
            running=self._admission.running,
            running_limit=self._admission.running_limit,
            queue_tokens=figures.queue_tokens,
            kv_bytes=figures.kv_bytes,
            kv_limit=figures.kv_limit,
            kv_held_bytes=figures.kv_held_bytes,
            prefill_tokens_s=figures.prefill_tokens_s,
            prefill_speeds=tuple(figures.prefill_speeds),
            decode_tokens_s=figures.decode_tokens_s,
            links=figures.links,
            vocab_size=self.info.profile.vocab_size if self.info else 0,
            senders={name: one for name, one in figures.senders.items() if name},
            strikes=verdicts.strikes,
            acquitted=tuple(verdicts.acquitted),
            fingerprint=self.info.digest if self.info else "",
            facts=self.info.facts if self.info else None,
            splits=self.info is not None and not self.split_refusal,
            layers=self.info.loaded if self.info else None,
            kv_version=self.kv_version,
        )

    @property
    def health_state(self) -> ServerState:
        """The `status` of GET /health."""
        if not self.engine_alive or self.engine_health.fault:
            return "error"
        return "stalled" if self.stalled or self._work_stuck else self.state

    @property
    def problem(self) -> str:
        """Why this loaded host cannot serve; "" if it can. Does not call the engine, which may be stuck."""
        if self.state == "loading":
            return ""
        if fault := self.engine_health.fault:
            return f"the engine of {self.host.name} does not work: {fault}"
        if self.stalled:
            return f"the engine of {self.host.name} has made no progress"
        if self._work_stuck:
            return f"all {self.work.bounds.threads} threads of {self.host.name} that prepare requests are stuck"
        return ""

    @property
    def _work_stuck(self) -> bool:
        return self.work.stuck_s(time.monotonic()) > 0

    def health(self) -> Health:
        """The answer of GET /health to a caller with the fleet's token."""
        info = self.info
        return Health(
            status=self.health_state,
            model=self.model.name,
            role=self.role,
            host=self.host.name,
            loaded=info is not None,
            backend=info.backend if info else None,
            simulated=self.host.simulated,
            version=VERSION,
            code=code_hash(),
            config=served_digest(self.fleet, self.host),
            release=os.environ.get(RELEASE_VARIABLE) or None,
            pending=PendingRelease(*newer) if (newer := pending_release()) else None,
            versions=info.versions if info else {},
            fingerprint=info.fingerprint if info else None,
            preflight=info.preflight if info else (),
            evidence=info.evidence if info else None,
            verified=info is None or self.host.simulated or verified(info.fingerprint.architecture, info.versions),
            boot_id=self.boot_id,
            uptime_s=round(time.monotonic() - self._started, 3),
            pid=os.getpid(),
        )

    def status(self, utilisation: float | None = None) -> Status:
        """The answer of GET /status. utilisation: of the accelerator, 0 to 1."""
        memory, info, figures = psutil.virtual_memory(), self.info, self.figures()
        return Status(
            **structs.asdict(self.health()),
            queue=self._admission.queued,
            running=self._admission.running,
            kv_bytes=figures.kv_bytes,
            kv_held_bytes=figures.kv_held_bytes,
            memory=Memory(
                total=memory.total,
                available=memory.available,
                process=psutil.Process().memory_info().rss,
                weights=info.memory_bytes if info else 0,
            ),
            device=DeviceUse(info.backend if info else None, psutil.cpu_percent(), utilisation),
            counters=self._counters,
            last_error=self._last_error,
            audit_every=figures.audit_every,
            senders=figures.senders,
            layers=info.loaded if info else None,
            model_layers=info.split.layers if info else 0,
            split_refusal=self.split_refusal,
        )

    def count(self, **added: int) -> None:
        """Add to counters, by their names."""
        self._counters = structs.replace(
            self._counters, **{name: getattr(self._counters, name) + more for name, more in added.items()}
        )

    def note_problem(self) -> None:
        """Report the problem as the last error, though no request may have met it."""
        self._last_error = last_error(ServerUnavailable(self.problem, "its log has the details"))


def last_error(error: BaseException) -> LastError:
    """An error as GET /status reports it."""
    now = round(time.time(), 3)
    if isinstance(error, DisaggError):
        return LastError(now, error.code(), error.message, error.hint)
    return LastError(now, type(error).__name__, repr(error))
