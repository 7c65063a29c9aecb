"""One request in the engine, with the calls to its listener, and all of them by id."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from disagg.api.sampling import Sampling
from disagg.engines.base import DecodeTiming, Listener, Token, require_room
from disagg.engines.base.audit import AuditBounds
from disagg.engines.mlx.adjust import Adjustment
from disagg.engines.mlx.batching.grouping import Row
from disagg.engines.mlx.held import PinnedArrays
from disagg.engines.model.constraint import Constraint
from disagg.engines.model.held import LayerSnapshot
from disagg.errors import DisaggError
from disagg.kv.received import ReceivedKV

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """One request in the engine.

    kv, held: until the caches are built. answered: how many of `tokens` belong to the answer. constraint: the form that
    the rest of it must have. hold_prompt: hold the KV of the prompt before the answer ends. audit: see DecodeRequest.
    covered: how many tokens'
    KV the caches contain that it begins with. snapshots: for the KV that is held after its end, see
    model.held.PrefixCache.add. ended: its tokens and caches, taken out of the batch at its end. finite: no probability
    was NaN, so that its KV may be used again. lock: held during calls to the listener. open: it may be called.
    """

    id: str
    tokens: list[int]
    sampling: Sampling
    kv: ReceivedKV | None
    listener: Listener
    held: PinnedArrays | None = None
    answered: int = 0
    salt: str = ""
    constraint: Constraint | None = None
    hold_prompt: bool = False
    audit: AuditBounds | None = None
    covered: int = 0
    snapshots: dict[int, LayerSnapshot] = field(default_factory=dict)
    ended: tuple[list[int], list[Any]] | None = None
    finite: bool = True
    timing: DecodeTiming = field(default_factory=DecodeTiming)
    lock: threading.RLock = field(default_factory=threading.RLock)
    open: bool = True
    uid: int | None = None  # in its batch's generator
    written: int = 0  # tokens computed so far
    adjustment: Adjustment | None = None

    @property
    def row(self) -> Row:
        """The job as `grouping` counts it: with its whole prompt, and the longest answer that it may have."""
        return Row(len(self.tokens) + self.written, self.sampling.max_tokens - self.answered - self.written)

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
                _log.exception("the listener of request %s failed; the request is dropped", self.id)
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
                _log.exception("the listener of request %s failed", self.id)


class Jobs(dict[str, Job]):
    """The requests in the engine, by id."""

    def add(self, job: Job) -> None:
        """RequestError if the id is in use, Overloaded if there are MAX_REQUESTS."""
        require_room(self, job.id)
        self[job.id] = job

    def drop(self, job: Job) -> None:
        """Nothing happens if it is not there any more, or its id is another request's."""
        if self.get(job.id) is job:
            del self[job.id]
