"""The running batch: groups of requests with similar lengths. Used by the engine's thread only.

A BatchGenerator pads every sequence to its longest one. Here several run side by side, one per group, and every group
takes one step per turn; `passes` chooses the group of a new request, which stays in it to its end.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from disagg.config import EngineOptions
from disagg.engines.base import Token
from disagg.engines.base.audit import AuditBounds, plan, refutation
from disagg.engines.decoding import Caches, Job
from disagg.engines.decoding.tail import TailPace, Tails
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.mlx.audit import audit
from disagg.engines.mlx.batch import Group, reads_tokens, row_of
from disagg.engines.mlx.load import LoadedModel
from disagg.engines.mlx.passes import ChunkLength, choose_group, kv_growth
from disagg.engines.mlx.prefix_cache import CachedPrefix, snapshot
from disagg.engines.mlx.span import MLXTail, Spans
from disagg.engines.model.reference import EngineInfo
from disagg.errors import LayoutMismatch
from disagg.kv.arriving import ArrivingKV
from disagg.kv.received import ReceivedKV

_log = logging.getLogger(__name__)

# The cost of a pass per layer on top of its weights, as bytes that could be read in that time: 20 us (the roofline's
# layer overhead) at the 620 GB/s that an M3 Ultra reaches.
_LAYER_BYTES = 12_000_000


class GroupedBatch:
    """A Batch. Running requests, at most `options.max_batch` in all groups together, and a queue of those that wait.
    Prompts that are computed together share `options.chunk_tokens` tokens per step."""

    def __init__(
        self, loaded: LoadedModel, spans: Spans, info: EngineInfo, options: EngineOptions, stream: Any
    ) -> None:
        self._model, self._stream, self._layout = loaded.model, stream, info.layout
        self._eos_ids = info.eos_ids
        self._max_batch, self._chunk = options.max_batch, ChunkLength(options.chunk_tokens)
        layout = info.layout
        self._kv_bytes: Callable[[int], int] = kv_growth(layout)
        self._pass_bytes = loaded.active_bytes + _LAYER_BYTES * len(layout.layers)
        begin_tail = partial(MLXTail, spans=spans, layout=info.layout)
        self._tails = Tails(begin_tail, TailPace(options.chunk_tokens, spans.split.layers))
        self._groups: list[Group] = []
        self._group_of: dict[Job, Group] = {}
        self._waiting: deque[tuple[Job, Caches]] = deque()  # bounded by the engine's requests
        # Set here because every generator sets this limit and restores the previous one when it is closed: the first to
        # close would reset it for the others.
        self._previous_wired_limit: int | None = maybe_set_recommended_wired_limit()

    def __len__(self) -> int:
        return len(self._group_of) + len(self._waiting) + len(self._tails)

    @property
    def due(self) -> bool:
        return bool(self._group_of or self._waiting) or self._tails.due(answers=self._answers)

    @property
    def _answers(self) -> bool:
        """Whether an answer is written that a tail would delay."""
        return any(group.answering for group in self._groups)

    @property
    def nbytes(self) -> int:
        waiting = sum(int(cache.nbytes) for _, caches in self._waiting for cache in caches or ())
        return waiting + self._tails.nbytes + sum(group.nbytes for group in self._groups)

    def receive(self, job: Job) -> None:
        self._tails.add(job)

    def compute_tail(self) -> Job | None:
        return self._tails.compute(answers=self._answers)

    def build(self, job: Job) -> Caches:
        """Drops the job's references to its KV."""
        kv, tail = (job.kv, ()) if job.arriving is None else self._arrived(job, job.arriving)
        held, tokens = job.held, job.request.tokens
        job.kv = job.arriving = job.held = job.tail = None
        if kv is None and held is None:
            return None
        prefix = held.read() if held is not None else None
        caches = mlx_cache.build(self._model, kv, prefix, tail=tail)
        if job.request.audit is not None and kv is not None and kv.tokens > kv.start:
            self._audit(job, kv, job.request.audit, caches, prefix)
        job.covered = kv.tokens if kv is not None else held.tokens if held is not None else 0
        if 0 < job.covered == len(tokens) - 1 and (taken := snapshot(caches, job.covered)) is not None:
            job.snapshots[job.covered] = taken
        return caches

    def _arrived(self, job: Job, arriving: ArrivingKV) -> tuple[ReceivedKV | None, Sequence[Any]]:
        """The KV that has arrived, and the caches of the layers that were computed here, after as many tokens. If the
        head has failed, both are of the tokens that had arrived whole: none if it has layers with a state."""
        kv = arriving.partial()
        if arriving.outcome != "complete":
            job.timing.resumed_at = kv.tokens if kv is not None else arriving.start
        if kv is not None and job.tail.layers and job.tail.covered != kv.tokens:
            raise LayoutMismatch(f"{kv.tokens} tokens have arrived, and {job.tail.covered} are computed")
        return kv, job.tail.caches if kv is not None else ()

    def _audit(
        self, job: Job, kv: ReceivedKV, limits: AuditBounds, caches: list[Any], held: CachedPrefix | None
    ) -> None:
        """Compare received KV with what this model computes. Raises KVRefuted if it differs by more than rounding."""
        began = time.monotonic()
        planned = plan(self._layout, kv.start, kv.tokens, seed=job.request.id)
        try:
            found = audit(self._model, caches, job.request.tokens[: kv.tokens], planned, held)
        except Exception:  # noqa: BLE001 - out of memory, for one: the KV may be right
            _log.exception("the KV of request %s could not be audited", job.request.id)
            return
        job.timing.audit, job.timing.audit_s = found, time.monotonic() - began
        if (wrong := found.over(limits)) is not None:
            raise refutation(wrong, limits, found.tokens)

    def insert(self, job: Job, caches: Caches) -> None:
        if len(self._group_of) + len(self._waiting) < self._max_batch:
            self._place(job, caches)
        else:
            self._waiting.append((job, caches))

    def remove(self, job: Job) -> None:
        if (group := self._group_of.pop(job, None)) is not None:
            group.remove(job)
            self._drop_empty()
        elif job.tail is not None:
            self._tails.remove(job)
        else:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not job)

    def step(self) -> list[tuple[Job, Token]]:
        while self._waiting and len(self._group_of) < self._max_batch:
            self._place(*self._waiting.popleft())
        side_by_side = sum(group.reading for group in self._groups)
        length = self._chunk.length(side_by_side)
        began = time.monotonic()
        generated = [job_and_token for group in self._groups for job_and_token in group.step(length)]
        if side_by_side:
            self._chunk.took(time.monotonic() - began)
        return generated

    def drop_finished(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._group_of.pop(job).drop_finished(job)
        if jobs:
            self._drop_empty()

    def close(self) -> None:
        """Restores the wired limit."""
        self._tails.clear()
        self._waiting.clear()
        self._group_of.clear()
        for group in self._groups:
            group.close()
        self._groups.clear()
        if self._previous_wired_limit is not None:
            mx.synchronize(self._stream)
            mx.set_wired_limit(self._previous_wired_limit)
            self._previous_wired_limit = None

    def _place(self, job: Job, caches: Caches) -> None:
        # Some requests wait for each token of their group's steps: they do not slow down the others.
        groups = [group for group in self._groups if group.reads_tokens == reads_tokens(job)]
        index = choose_group([group.rows for group in groups], row_of(job), self._kv_bytes, self._pass_bytes)
        if index is not None:
            group = groups[index]
            group.insert(job, caches)
        else:
            group = Group(self._model, stream=self._stream, eos_ids=self._eos_ids, max_batch=self._max_batch)
            group.insert(job, caches)
            self._groups.append(group)
        self._group_of[job] = group

    def _drop_empty(self) -> None:
        for group in [group for group in self._groups if not len(group)]:
            self._groups.remove(group)
            group.close()
