"""What a gateway answers beside the APIs of others.

GET /api/live      the requests, hosts and models that it knows now
GET /api/history   the requests that have ended
POST /v1/parallel  several requests in one body
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from disagg.api.base import Contract
from disagg.api.keeper import KeptModel, ModelFacts, ModelState
from disagg.api.names import RequestPhase, Role
from disagg.api.status import SenderAudits

MAX_SHOWN: Final = 100
"""Running requests that one LiveState lists; its totals count them all."""
LAST: Final = 20
"""Finished answers that one LiveState lists."""

HostState = Literal[
    "up", "loading", "draining", "stalled", "error", "failing", "down", "unknown", "asleep", "failed", "absent"
]
ENDED_HOSTS: Final = "request_ended_hosts"
"""The error_code of a request that ended the processes of hosts."""
MAX_ENTRIES: Final = 1000
"""Entries of one HistoryAnswer."""
MAX_ID: Final = (1 << 63) - 1
ModelWord = ModelState | Literal["down"]
"""A model's state on the host on which it is readiest. ready: a request is answered at once. down: no host of it
answers."""
EntryState = Literal["ok", "failed", "cancelled"]
MAX_ITEMS: Final = 32
"""Requests in one body of POST /v1/parallel."""
MAX_NAME: Final = 64
"""Characters of the name of one of them."""


class LiveRequest(Contract, frozen=True, kw_only=True):
    """A request that runs. number: unique in this gateway. seconds: since it began; phase_seconds: since its phase
    began. Its phase is that of its answer that is furthest behind. tokens: of all its answers."""

    number: int
    request_id: str
    api: str
    model: str
    phase: RequestPhase
    seconds: float
    phase_seconds: float
    key: str | None = None
    method: str | None = None
    prefill_server: str | None = None
    decode_server: str | None = None
    prompt_tokens: int = 0
    held_tokens: int = 0
    tokens: int = 0
    choices: int = 1


class LiveHost(Contract, frozen=True, kw_only=True):
    """A host. reason: why it gets no requests, empty if it does; hint: what to do about it. queue, running: requests.
    kv_bytes: reserved by requests; kv_held_bytes: of finished conversations; kv_limit: the bound on both. Speeds in
    tokens per second as the host measured them lately, None if it has not. senders: what a decode host found of the KV
    of each prefill host. facts: what the files of its model say. kept: of one model of a host with several, whose name
    is then HOST/MODEL, what the keeper states."""

    name: str
    role: Role
    model: str
    state: HostState
    reason: str = ""
    hint: str = ""
    queue: int = 0
    running: int = 0
    running_limit: int = 0
    kv_bytes: int = 0
    kv_held_bytes: int = 0
    kv_limit: int = 0
    prefill_tokens_s: float | None = None
    decode_tokens_s: float | None = None
    senders: Mapping[str, SenderAudits] = {}
    facts: ModelFacts | None = None
    kept: KeptModel | None = None


class Totals(Contract, frozen=True, kw_only=True):
    """The figures of one model, or of all. They count since the gateway started, except: running and waiting (in the
    queue) are of now, and the speeds, tokens per second of all requests together, are of the last seconds. kv_bytes:
    held and reserved on the decode hosts, now."""

    running: int = 0
    waiting: int = 0
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    fallbacks: int = 0
    prompt_tokens: int = 0
    held_tokens: int = 0
    completion_tokens: int = 0
    kv_bytes: int = 0
    prompt_tokens_s: float = 0.0
    completion_tokens_s: float = 0.0


class LiveModel(Contract, frozen=True, kw_only=True):
    """A model. context: tokens of the longest request, prompt and answer together. last: its last complete answer.
    state: that of the host on which it is readiest. on_demand: a host with several models has it, so that it can be
    loaded and unloaded. size_bytes: of its files, 0 if it is not known. expires_s: until it is unloaded, None: it
    stays. left_s: until it is loaded, None if it is not being loaded."""

    name: str
    totals: Totals
    context: int = 0
    last: HistoryEntry | None = None
    state: ModelWord = "ready"
    on_demand: bool = False
    size_bytes: int = 0
    expires_s: float | None = None
    left_s: float | None = None


class Sample(Contract, frozen=True, kw_only=True):
    """One point of the plots. time: seconds since 1970. ttft: median of the answers of the last seconds, in seconds;
    None if there were none. kv_bytes: held and reserved on all decode hosts."""

    time: float
    running: int
    waiting: int
    prompt_tokens_s: float
    completion_tokens_s: float
    ttft: float | None = None
    kv_bytes: int = 0


class LiveState(Contract, frozen=True, kw_only=True):
    """Everything that a view of the fleet shows. time, started: seconds since 1970. requests: those that began first,
    at most 100. last: the newest first. apis: the paths of the APIs that are served. source: "hosts" if these are the
    figures of the hosts themselves, which have no requests and answers, but how many run and wait."""

    fleet: str
    version: str
    time: float
    started: float
    totals: Totals
    models: tuple[LiveModel, ...] = ()
    hosts: tuple[LiveHost, ...] = ()
    requests: tuple[LiveRequest, ...] = ()
    last: tuple[HistoryEntry, ...] = ()
    sample: Sample | None = None
    apis: tuple[str, ...] = ()
    source: Literal["gateway", "hosts"] = "gateway"


class Past(Contract, frozen=True):
    """The first event of GET /api/live: the plots so far, oldest first."""

    samples: tuple[Sample, ...] = ()


class HistoryQuery(Contract, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The query of GET /api/history; all fields are optional. model: name or alias. since: seconds since 1970. before:
    an id, for the next page."""

    model: str | None = None
    state: EntryState | None = None
    since: float | None = None
    before: Annotated[int, Meta(ge=0, le=MAX_ID)] | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ENTRIES)] = 100


class HistoryEntry(Contract, frozen=True, kw_only=True):
    """One answer: complete, or with `state` why it is not. A request for several answers has an entry for each that is
    complete, and one more if it failed or was cancelled.

    Times in seconds, speeds in tokens per second, those that are not known are None. id: counts up. time: when the
    request began, seconds since 1970. api: the dialect. key, key_id: name and id of the caller's key; the name may
    have been that of another key, which is revoked. choice: number of the answer. reason: why these hosts and this
    method were tried. layers, resumed_at: of a prompt that both hosts computed, and of one whose prefill host failed.
    ttft_parts: seconds by name, which add up to ttft. prompt, answer: only if the gateway keeps texts.
    """

    time: float
    request_id: str
    api: str
    model: str
    state: EntryState
    total_time: float
    id: int = 0
    key: str | None = None
    key_id: str | None = None
    choice: int = 0
    method: str | None = None
    prefill_server: str | None = None
    decode_server: str | None = None
    reason: str = ""
    warnings: tuple[str, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int = 0
    held_tokens: int = 0
    layers: int | None = None
    resumed_at: int | None = None
    completion_tokens: int = 0
    ttft: float | None = None
    ttft_parts: Mapping[str, float] = {}
    prefill_time: float | None = None
    decode_time: float | None = None
    prefill_speed: float | None = None
    decode_speed: float | None = None
    kv_bytes: int = 0
    hidden_transfer: float = 0.0
    exposed_transfer: float = 0.0
    simulated: bool = False
    error_code: str | None = None
    error: str | None = None
    prompt: str | None = None
    answer: str | None = None


class HistoryAnswer(Contract, frozen=True):
    """GET /api/history. entries: newest first. stopped: why nothing is recorded any more; None if it is."""

    entries: tuple[HistoryEntry, ...] = ()
    stopped: str | None = None


class ParallelFigures(Contract, frozen=True):
    """What it was worth to run several requests at once, in seconds. Only answers that are complete count.

    complete: their number, n. wall: from the moment that all were sent to the end of the last answer. sequential_sum:
    the sum of their times, each from that moment to its own end. efficiency: sequential_sum / (wall x n): 1 if all took
    as long as the longest one, 1/n if all but that one took no time; None if there are none. A request that shares
    hosts with another one takes longer than alone, so that the sum is an upper bound of the time one after the other.
    """

    complete: int
    wall: float
    sequential_sum: float
    efficiency: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> ParallelFigures:
        """The figures of complete answers, from their times."""
        wall, total = max(seconds, default=0.0), sum(seconds)
        return cls(len(seconds), wall, total, total / (wall * len(seconds)) if wall > 0 else None)


class ParallelBody(Contract, frozen=True):
    """The body of POST /v1/parallel. requests: each the body of a chat or a completion, by whether it has `messages` or
    `prompt`, and a text `id` of at most 64 characters if its caller likes; its own `stream` does not count."""

    requests: Annotated[tuple[Mapping[str, Any], ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    stream: bool | None = None


class ParallelResult(Contract, frozen=True):
    """The end of one request. index: its number in the body, from 0. id: as its caller named it. status: as if it had
    been sent alone. seconds: from the moment that all were sent. body: the answer or the error; in a stream only an
    error, because the answer has been sent."""

    index: int
    id: str | None
    status: int
    seconds: float
    body: Mapping[str, Any] | UnsetType = UNSET


class ParallelAnswer(Contract, frozen=True):
    """The answer to POST /v1/parallel that is not streamed. results: in the order of the requests."""

    id: str
    object: str
    created: int
    results: tuple[ParallelResult, ...]
    disagg: ParallelFigures


class ParallelChunk(Contract, frozen=True):
    """One event of a stream: a chunk of the answer to one request."""

    index: int
    id: str | None
    body: Mapping[str, Any]


class ParallelEnd(Contract, frozen=True):
    """The last event of a stream before `[DONE]`."""

    disagg: ParallelFigures
