"""What the keeper of a host with several models states and is asked: which model is loaded, loads, unloads, files.

POST /models/load   load..., until the model is ready
POST /models/pull   pull..., until its files are there

Each stream may end with `error` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Meta

from disagg.api.base import Contract, Count
from disagg.api.requests import Port

ModelState = Literal["absent", "asleep", "loading", "ready", "draining", "failed"]
"""absent: its files are not all there. asleep: no process has it. loading: its process loads it. draining: it takes no
new request and goes once it has answered. failed: its process could not load it, or has ended several times."""
EvictionReason = Literal["room", "idle", "asked", "max_loaded"]
"""Why a model was unloaded. room: another one needed its memory. idle: nobody has used it for its idle_ttl. asked: by
a person or a request. max_loaded: another one needed its place."""
EVICTION_REASONS: Final[tuple[EvictionReason, ...]] = ("room", "idle", "asked", "max_loaded")
MAX_KEPT: Final = 256
"""Models of one host."""
FOR_EVER_S: Final = -1.0
MAX_KEEP_ALIVE_S: Final = 1e9

Name = Annotated[str, Meta(max_length=256)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
Reason = Annotated[str, Meta(max_length=2000)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
KeepAlive = Annotated[float, Meta(ge=FOR_EVER_S, le=MAX_KEEP_ALIVE_S)]


class ModelFacts(Contract, frozen=True, kw_only=True):
    """What the files of a model say of it. size_bytes: of its weights. parameters: about; 0 if their number cannot be
    computed. form: of the weights, such as bfloat16 or mxfp4. context: tokens that it reads, 0 if it does not say.
    tools, reasons: its chat template knows tools, and reasoning apart from the answer."""

    size_bytes: Count = 0
    parameters: Count = 0
    form: Name = ""
    architecture: Name = ""
    context: Count = 0
    tools: bool = False
    reasons: bool = False


class KeptModel(Contract, frozen=True, kw_only=True):
    """One model of a host, as its keeper states it.

    port: of its process, also while there is none; kv_port: the same for KV, None of a prefill host. wait_s: expected
    until a request that comes now can begin: what is left of its load, the loads before it, what must go first.
    evicts: loading it takes the memory or the place of another model. need_bytes: memory that it takes. read_bytes,
    total_bytes: of its files, read by this load, and all. running, waiting: requests; waiting has those who wait for
    it at the keeper. reason: why it is absent or failed, or that its process gives no sign of life. expires_s: until it
    goes if nobody uses it, None if it stays.
    used_s: since it was last used, None if never. loads, evictions: how often it was loaded, and unloaded by reason,
    since the keeper started. load_s: what its last load took. resident_bytes: measured of its process. facts: None
    while it is absent.
    """

    model: Name
    state: ModelState
    port: Port
    kv_port: Port | None = None
    wait_s: Seconds = 0.0
    evicts: bool = False
    need_bytes: Count = 0
    read_bytes: Count = 0
    total_bytes: Count = 0
    running: Count = 0
    waiting: Count = 0
    pinned: bool = False
    reason: Reason = ""
    expires_s: Seconds | None = None
    used_s: Seconds | None = None
    loads: Count = 0
    load_s: Seconds | None = None
    evictions: Mapping[EvictionReason, Count] = {}
    pid: Count | None = None
    resident_bytes: Count = 0
    facts: ModelFacts | None = None


class LoadModelBody(Contract, frozen=True, forbid_unknown_fields=True):
    """POST /models/load. The connection is the place in the queue: whoever closes it gives the place up. keep_alive_s:
    how long the model stays loaded after its last request; None: as hosts.toml says; 0: it goes as soon as it is idle;
    -1: it stays."""

    model: ModelName
    keep_alive_s: KeepAlive | None = None


class LoadEvent(Contract, frozen=True, kw_only=True):
    """Sent at least once a second until the model is ready. position: loads before this one, 0: it loads. read_bytes,
    total_bytes: of its files. left_s: expected until it is ready. port, kv_port: as in KeptModel."""

    event: ClassVar[str] = "load"
    model: Name
    state: ModelState
    position: Count = 0
    read_bytes: Count = 0
    total_bytes: Count = 0
    left_s: Seconds = 0.0
    port: Port
    kv_port: Port | None = None


class UnloadBody(Contract, frozen=True, forbid_unknown_fields=True):
    """POST /models/unload. force: also if requests use it, which then fail; else it is refused."""

    model: ModelName
    force: bool = False


class KeepBody(Contract, frozen=True, forbid_unknown_fields=True):
    """POST /models/keep: how long a loaded model stays after its last request, until a load says otherwise. 0: it goes
    as soon as it is idle; -1: it stays. One that is not loaded is not loaded by it, and nothing happens."""

    model: ModelName
    keep_alive_s: KeepAlive


class PinBody(Contract, frozen=True, forbid_unknown_fields=True):
    """POST /models/pin. A pinned model is not unloaded for others, and not for being idle."""

    model: ModelName
    pinned: bool = True


class PullBody(Contract, frozen=True, forbid_unknown_fields=True):
    """POST /models/pull: fetch the model's files to this host. Whoever closes the connection ends the fetch, which
    goes on from there the next time."""

    model: ModelName


class PullEvent(Contract, frozen=True, kw_only=True):
    """What a pull does: status in words, and the bytes of the file or files that it is at. digest: of that file."""

    event: ClassVar[str] = "pull"
    status: Name
    digest: Name = ""
    total: Count = 0
    completed: Count = 0


class DeleteBody(Contract, frozen=True, forbid_unknown_fields=True):
    """POST /models/delete: remove the model's files from this host. It is unloaded first; refused if requests use it,
    or if another host of this machine uses the files."""

    model: ModelName


class ModelsAnswer(Contract, frozen=True):
    """What a keeper answers to POST /models/keep, /models/unload, /models/pin and /models/delete: its models
    afterwards."""

    models: Annotated[tuple[KeptModel, ...], Meta(max_length=MAX_KEPT)] = ()


class MemoryClaim(Contract, frozen=True, kw_only=True):
    """What a host's model takes of its machine's memory, as the machine's other hosts read it (disagg/ledger.py).

    source: hub id or folder of its files. pool: whose memory it is, "" for that of the system. stays: it does not go
    for others. leaves: it is going. wanted: bytes that the host lacks, for which others give up what they can; since:
    when it began to, seconds since 1970.
    """

    host: Name
    model: Name = ""
    source: Reason = ""
    nbytes: Count = 0
    pool: Name = ""
    stays: bool = False
    leaves: bool = False
    wanted: Count = 0
    since: float = 0.0
