"""The answers of GET /health, GET /load, GET /status and POST /lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from disagg.api.base import BoundShare, Contract, Count
from disagg.api.keeper import MAX_KEPT, KeptModel, ModelFacts
from disagg.api.names import KV_WHOLE, Role
from disagg.api.requests import Layers, NewestKV, PromptSpeeds

Verdict = Literal["accepted", "refuted"]
Rate = Annotated[float, Meta(ge=0, le=1e13)]
"""Tokens or bytes per second."""
KeptModels = Annotated[tuple[KeptModel, ...], Meta(max_length=MAX_KEPT)]
ServerState = Literal["loading", "ok", "draining", "stalled", "error", "no_host"]


class Liveness(Contract, frozen=True):
    """GET /health without the fleet's token. "stalled": the engine, or every thread that prepares requests, has work
    and makes no progress. "error": the engine has stopped. Both are sent with HTTP status 503. A gateway is "loading"
    until a host of one of its models is up, and "no_host" while none is any more; it sends 503 with both."""

    status: ServerState


class SenderAudits(Contract, frozen=True, kw_only=True):
    """What a decode host has found of the KV of one prefill host since it started. accepted, refuted: hand-offs; those
    that were not audited are not counted. verdict: the last one. deviation: by how much the last accepted KV differed
    from what was computed here, as a share of the bound beyond which it is refuted; highest: the most of any."""

    accepted: Count = 0
    refuted: Count = 0
    verdict: Verdict | None = None
    deviation: BoundShare | None = None
    highest: BoundShare | None = None


class Load(Liveness, frozen=True, kw_only=True):
    """GET /load: what routing needs, cheap enough to be read every second.

    boot_id: random, new at every start of the server. queue, running: requests. queue_tokens: prompt tokens that
    are not computed yet, and do not wait for their decode host. kv_bytes: reserved by requests; kv_limit: the bound
    on them. kv_held_bytes: of finished conversations, given up if a request needs the room. prefill_tokens_s,
    decode_tokens_s: measured lately, None if not measured; prefill_tokens_s is that of all layers, decode_tokens_s
    of one request. prefill_speeds: for prompts of different lengths, of a prefill host. links: rate in bytes/s of
    recent transfers from this host, by "address:port" of the decode host. vocab_size: of the model, 0 until it has
    loaded. senders: what audits found of the KV of each prefill host, by
    its name; empty if it has not stated one. strikes: how much more often it has ended while it computed a request than
    it has computed it, by the request's mark; acquitted: marks with strikes elsewhere that it has computed; see
    disagg/strikes.py. splits: the host can compute a prompt together with another one, each some of the layers.
    layers: it has the model's first so many, None: all. kv_version: the latest of the KV protocol that it knows.
    fingerprint: a digest of the model, its weights and the engine's packages, empty until the model has loaded.
    facts: what the model's files say of it, None until it has loaded.
    models: of a host with several, whose keeper states its own boot_id and the sums of its models' requests and KV.
    budget_bytes, used_bytes: the memory that these models may take together, and what those that are loaded take.
    """

    boot_id: Annotated[str, Meta(max_length=64)]
    queue: Count = 0
    running: Count = 0
    running_limit: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    queue_tokens: Count = 0
    kv_bytes: Count = 0
    kv_limit: Count = 0
    kv_held_bytes: Count = 0
    prefill_tokens_s: Rate | None = None
    prefill_speeds: PromptSpeeds = ()
    decode_tokens_s: Rate | None = None
    links: Annotated[Mapping[Annotated[str, Meta(max_length=300)], Rate], Meta(max_length=1024)] = {}
    vocab_size: Count = 0
    senders: Annotated[Mapping[Annotated[str, Meta(max_length=256)], SenderAudits], Meta(max_length=1024)] = {}
    strikes: Annotated[Mapping[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=1024)] = {}
    acquitted: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=1024)] = ()
    splits: bool = False
    layers: Layers | None = None
    kv_version: NewestKV = KV_WHOLE
    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    facts: ModelFacts | None = None
    models: KeptModels = ()
    budget_bytes: Count = 0
    used_bytes: Count = 0


class LeaseAnswer(Contract, frozen=True):
    """POST /lease: of the requests, those that this host does not have: they have ended, or not come yet."""

    unknown: tuple[str, ...] = ()


class CountAnswer(Contract, frozen=True):
    """POST /count: how many tokens the prompt has. tokens, texts: if they are listed, their ids and the bytes of the
    text that each stands for."""

    prompt_tokens: int
    tokens: tuple[int, ...] = ()
    texts: tuple[bytes, ...] = ()


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


class Evidence(Contract, frozen=True):
    """What an engine found likeliest after a fixed text when it was loaded. prompt: hash of the text's tokens, `tokens`
    of them. likeliest: the next token after each of the last ones."""

    prompt: str
    tokens: int
    likeliest: tuple[int, ...]

    def agreeing(self, other: Evidence) -> int | None:
        """The number of places in which both found the same token; None if their texts differ."""
        if (self.prompt, len(self.likeliest)) != (other.prompt, len(other.likeliest)):
            return None
        return sum(one == two for one, two in zip(self.likeliest, other.likeliest, strict=True))


class PendingRelease(Contract, frozen=True):
    """A release that was deployed and does not run yet. since: seconds since 1970. code, config: as in Health, of that
    release; empty if it does not state them."""

    release: str
    since: float
    code: str = ""
    config: str = ""


class Health(Liveness, frozen=True, kw_only=True):
    """GET /health with the fleet's token.

    model: empty for a gateway and for a host with several. backend: framework and device, None until the engine has
    loaded. code: hash of the disagg code that runs. config: hash of what the host's hosts.toml says about it. boot_id:
    random, new at every start. release: the deployed release that runs, None if it runs from an installation. pending:
    the release that `disagg restart` would run instead. tokens: that it accepts, by the first 8 digits of each one's
    hash, the current one first. versions: of the engine's packages. verified: whether disagg's own tests have compared
    answers of this architecture. evidence: None until the engine has loaded, and of engines that state none.
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
    pending: PendingRelease | None = None
    tokens: tuple[str, ...] = ()
    versions: Mapping[str, str] = {}
    fingerprint: ModelFingerprint | None = None
    preflight: tuple[PreflightFinding, ...] = ()
    verified: bool = True
    evidence: Evidence | None = None
    boot_id: str = ""
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
    """Totals since the server started. computed_prompt_tokens: prompt tokens run through the model here for answers;
    audited_tokens: those that ran to audit received KV. refuted: requests whose received KV was refuted."""

    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    computed_prompt_tokens: int = 0
    kv_bytes_total: int = 0
    audited_tokens: int = 0
    refuted: int = 0


class LastError(Contract, frozen=True):
    """The last request that failed on a host. time: seconds since 1970."""

    time: float
    code: str
    message: str
    hint: str = ""


class Status(Health, frozen=True, kw_only=True):
    """GET /status: health, load, memory and counters. kv_bytes: KV of requests that the host holds now. kv_held_bytes:
    KV of finished conversations, kept for their next turns. audit_every: one hand-off in so many is audited, 0: none.
    senders: what these audits found, by the name of the prefill host; empty if it stated none. layers, models,
    budget_bytes, used_bytes: as of Load.
    model_layers: that the model has, 0 until it has loaded.
    split_refusal: why the model's layers cannot be divided between two hosts; empty if they can, or the host has not
    loaded."""

    queue: int
    running: int
    kv_bytes: int
    kv_held_bytes: int = 0
    memory: Memory
    device: DeviceUse
    counters: Counters
    last_error: LastError | None = None
    audit_every: int = 0
    senders: Mapping[str, SenderAudits] = {}
    layers: Layers | None = None
    model_layers: int = 0
    split_refusal: str = ""
    models: KeptModels = ()
    budget_bytes: Count = 0
    used_bytes: Count = 0


class ProcessReport(Contract, frozen=True, kw_only=True):
    """What the process of one model tells its keeper, a line of JSON each, twice a second and after each order.

    answers: the number of the last order that it has carried out or refused; refused: it has refused that one, since
    requests run."""

    load: Load
    counters: Counters
    answers: Count = 0
    refused: bool = False


class ProcessOrder(Contract, frozen=True, kw_only=True):
    """A keeper's order to the process of a model: take no more requests, and end. number: counts up. drains: end after
    the requests that it has; cuts: end them; else refuse the order if it has any."""

    number: Count
    drains: bool = False
    cuts: bool = False
