"""The answers of GET /health and GET /status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from disagg.api.base import Contract
from disagg.api.names import Role

ServerState = Literal["loading", "ok", "draining", "error"]


class Liveness(Contract, frozen=True):
    """GET /health without the fleet's token. "error": the engine has stopped."""

    status: ServerState


class PreflightFinding(Contract, frozen=True):
    """One comparison of the preflight. "patched": the frameworks differ, and disagg corrects it."""

    component: str
    status: Literal["ok", "patched", "refused"]
    detail: str = ""


class ModelFingerprint(Contract, frozen=True):
    """What must be equal on both hosts of a hand-off. rope, tokenizer, chat_template and special_tokens are hashes."""

    architecture: str
    vocab_size: int
    rope: str
    tokenizer: str
    chat_template: str
    special_tokens: str


class Health(Liveness, frozen=True, kw_only=True):
    """GET /health with the fleet's token.

    backend: framework and device, None until the engine has loaded. code: hash of the disagg code that runs. config:
    hash of what the host's hosts.toml says about it. release: the deployed release, None if it runs from an
    installation. versions: of the engine's packages.
    """

    model: str
    role: Role
    host: str
    loaded: bool = False
    backend: str | None = None
    simulated: bool = False
    version: str = ""
    code: str = ""
    config: str = ""
    release: str | None = None
    versions: Mapping[str, str] = {}
    fingerprint: ModelFingerprint | None = None
    preflight: tuple[PreflightFinding, ...] = ()
    uptime_s: float = 0.0
    pid: int = 0


class Memory(Contract, frozen=True):
    """Bytes. total, available: of the machine. process: resident memory of the server. weights: of the model."""

    total: int
    available: int
    process: int
    weights: int = 0


class DeviceUse(Contract, frozen=True):
    """cpu_percent: of the whole machine, 0 to 100. utilisation: of the accelerator, 0 to 1; None if unknown."""

    name: str | None = None
    cpu_percent: float | None = None
    utilisation: float | None = None


class Counters(Contract, frozen=True):
    """Totals since the server started. computed_prompt_tokens: prompt tokens run through the model here."""

    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    computed_prompt_tokens: int = 0
    kv_bytes_total: int = 0


class LastError(Contract, frozen=True):
    """The last request that failed on a host. time: seconds since 1970."""

    time: float
    code: str
    message: str
    hint: str = ""


class Status(Health, frozen=True, kw_only=True):
    """GET /status: health, load, memory and counters. kv_bytes: KV that the host holds now."""

    queue: int
    running: int
    kv_bytes: int
    memory: Memory
    device: DeviceUse
    counters: Counters
    last_error: LastError | None = None
