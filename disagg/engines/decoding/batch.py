"""What a framework gives a DecodeEngine: a Backend, its loaded model; and a Batch, which computes its Jobs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from disagg.engines.base import ChunkScores, DecodeRequest, DecodeTiming, EngineInfo, Listener, Token
from disagg.engines.model.prefix_cache import PinnedPrefix, PrefixCache
from disagg.engines.model.text import PromptTokenizer
from disagg.errors import DisaggError
from disagg.kv.arriving import ArrivingKV
from disagg.kv.received import ReceivedKV

Caches = list[Any] | None
"""A request's KV as the framework's caches, one per layer; None for a request without."""

_log = logging.getLogger(__name__)


class Backend(Protocol):
    """A loaded model. Its methods are for the engine's thread; `held` may be searched on any."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def tokenizer(self) -> PromptTokenizer: ...

    @property
    def held(self) -> PrefixCache[Any, Any]:
        """The KV of requests that have ended."""
        ...

    def new_batch(self) -> Batch: ...

    def scoring(self, tokens: Sequence[int], top: int) -> Scoring:
        """A pass that scores all of these tokens but the first, with `top` alternatives of each. CapabilityMissing if
        the framework cannot."""
        ...

    def hold(self, job: Job, tokens: list[int], caches: Any) -> None:
        """Keep the KV of these tokens of a request, for one that begins with the same."""
        ...

    def release_memory(self) -> None:
        """Return to the system what the framework keeps of freed memory: no request is left."""
        ...

    def trim_memory(self) -> None:
        """Return what takes longer to return: there has been no request for a second."""
        ...


class Scoring(Protocol):
    """A pass over a prompt beside the batch, a chunk at a time."""

    @property
    def remaining(self) -> int:
        """Tokens that are not scored yet."""
        ...

    def step(self) -> ChunkScores: ...

    def close(self) -> None:
        """Let go of its caches."""
        ...


class Batch(Protocol):
    """Requests that run, and a queue of those that wait for a place among them. For the engine's thread."""

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of their KV, with padding and room for growth."""
        ...

    def build(self, job: Job) -> Caches:
        """The job's received and held KV as caches. KVRefuted if an audit finds that the received KV is wrong."""
        ...

    def receive(self, job: Job) -> None:
        """Take a job whose KV arrives: its layers that do not are computed by `compute_tail`, chunk by chunk."""
        ...

    def insert(self, job: Job, caches: Caches) -> None:
        """Add the job at the next step. Its tokens that `caches` do not cover are computed on top of them."""
        ...

    def remove(self, job: Job) -> None:
        """Drop the job at any stage; no effect if it is not here. Sets `job.ended` if it was in its answer."""
        ...

    @property
    def due(self) -> bool:
        """Whether there is something to compute now. Takes no lock."""
        ...

    def compute_tail(self) -> Job | None:
        """Compute a piece of what has arrived, if there is any and its time has come. Returns a job all of whose KV is
        there, for `build`, or of which nothing more will arrive; or one with an `error`."""
        ...

    def step(self) -> list[tuple[Job, Token]]:
        """One token for every job in its answer, and a chunk for every one whose prompt is being computed."""
        ...

    def drop_finished(self, jobs: Sequence[Job]) -> None:
        """Drop jobs whose last token was returned."""
        ...

    def close(self) -> None:
        """Drop every job and cache; not usable afterwards. May be called twice."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """A request in the engine, with the calls to its listener.

    request: without its KV. kv, arriving, held: its KV, until the caches are built. news: something of it has
    arrived since the batch has looked. tail: what the batch has computed of it meanwhile. covered: of how many of
    its first tokens the caches have the KV. written: tokens of the answer that were computed here. snapshots: what
    PrefixCache.add needs for the KV that is held after its end. ended: its tokens and caches, taken out of the
    batch at its end. error: why the answer cannot go on with the token of this step. finite: no probability was
    NaN, so that its KV may be used again. lock: taken during calls to the listener. open: it may be called."""

    request: DecodeRequest
    listener: Listener
    kv: ReceivedKV | None = None
    arriving: ArrivingKV | None = None
    held: PinnedPrefix[Any, Any] | None = None
    news: bool = False
    tail: Any = None
    covered: int = 0
    written: int = 0
    snapshots: dict[int, Any] = field(default_factory=dict)
    ended: tuple[list[int], Any] | None = None
    error: DisaggError | None = None
    finite: bool = True
    timing: DecodeTiming = field(default_factory=DecodeTiming)
    lock: threading.RLock = field(default_factory=threading.RLock)
    open: bool = True

    def deliver(self, token: Token) -> bool:
        """Call the listener with the token; False if it raised."""
        self.timing.first_token = self.timing.first_token or time.monotonic()
        with self.lock:
            if not self.open:
                return True
            self.open = token.finish is None
            try:
                self.listener.on_tokens((token,), self.timing)
            except Exception:  # noqa: BLE001 - an error in a listener ends its own request only
                _log.exception("the listener of request %s failed; the request is dropped", self.request.id)
                self.open = False
                return False
        return True

    def fail(self, error: DisaggError) -> None:
        """Call the listener with the error that ends the request."""
        with self.lock:
            if not self.open:
                return
            self.open = False
            try:
                self.listener.on_error(error)
            except Exception:  # noqa: BLE001 - as in deliver
                _log.exception("the listener of request %s failed", self.request.id)
