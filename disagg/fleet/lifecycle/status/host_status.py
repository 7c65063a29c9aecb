"""The status of one server: its health, and what it reported.

    healthy       serves
    loading       runs, the model is not ready yet
    silent        its process runs, but does not answer in time
    stalled       answers, but its engine has work and makes no progress
    draining      finishes its requests, then ends
    failed        runs but cannot serve, or has ended and was not stopped by disagg
    unauthorised  does not accept this fleet's token
    foreign       another program, or another host's server, answers on its port
    not running   the machine answers, nothing listens there
    unreachable   the machine does not answer

Every state but healthy has a reason and a hint; a healthy host may have a remark there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from disagg.api.keeper import KeptModel
from disagg.api.status import (
    Counters,
    DeviceUse,
    Evidence,
    LastError,
    Memory,
    ModelFingerprint,
    PendingRelease,
    PreflightFinding,
    SenderAudits,
)

HealthState = Literal[
    "healthy",
    "loading",
    "silent",
    "stalled",
    "draining",
    "failed",
    "unauthorised",
    "foreign",
    "not running",
    "unreachable",
]


Difference = Literal["code", "settings", "token"]


@dataclass(frozen=True, slots=True)
class HostStatus:
    """One server as seen from this machine. Bytes, seconds; None if unknown.

    why, hint: of the state; for a healthy host a remark, usually empty. The fields from `backend` to `used_bytes` are
    those of `disagg.api.status.Status`. differs: in what a healthy host differs from others, or from hosts.toml.
    supervised: after what its service manager restarts it. restarts: how often it did.
    """

    host: str
    roles: tuple[str, ...]
    model: str
    url: str
    state: HealthState
    why: str = ""
    hint: str = ""
    backend: str | None = None
    version: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    fingerprint: ModelFingerprint | None = None
    preflight: tuple[PreflightFinding, ...] = ()
    verified: bool = True
    evidence: Evidence | None = None
    uptime_s: float | None = None
    pid: int | None = None
    queue: int | None = None
    running: int | None = None
    kv_bytes: int | None = None
    kv_held_bytes: int | None = None
    memory: Memory | None = None
    device: DeviceUse = field(default_factory=DeviceUse)
    counters: Counters | None = None
    simulated: bool = False
    code: str | None = None
    config: str | None = None
    release: str | None = None
    pending: PendingRelease | None = None
    tokens: tuple[str, ...] = ()
    last_error: LastError | None = None
    audit_every: int | None = None
    senders: Mapping[str, SenderAudits] = field(default_factory=dict)
    layers: int | None = None
    model_layers: int | None = None
    split_refusal: str = ""
    models: tuple[KeptModel, ...] = ()
    budget_bytes: int | None = None
    used_bytes: int | None = None
    differs: tuple[Difference, ...] = ()
    supervised: Literal["", "crash", "crash, reboot"] = ""
    restarts: int | None = None

    @property
    def ok(self) -> bool:
        return self.state == "healthy"

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = msgspec.to_builtins(self)
        return body


def exit_code(statuses: Sequence[HostStatus]) -> int:
    """0 if all are healthy and none differs, 1 if all are healthy, 4 if a machine does not answer, else 3."""
    if all(status.ok for status in statuses):
        return int(any(status.differs for status in statuses))
    return 4 if any(status.state == "unreachable" for status in statuses) else 3
