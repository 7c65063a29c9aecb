"""The running batch: requests in, tokens out, in few passes. Used by the engine's thread only.

One BatchGenerator pads every sequence to its longest. Here several run side by side, a group each, and every group
takes one step per turn; `grouping` decides who joins which. A sequence stays in its group to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from disagg.engines.base import Token
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.mlx import grouping
from disagg.engines.mlx.batch import Batch, Job, row
from disagg.engines.mlx.prepare import Prepared

# Prompts that are computed side by side share the prompt tokens of one step, but each gets this many. On the CPU
# backend attention makes [prompts, heads, chunk, context] scores: eight prompts of 4,000 tokens took the process of a
# 1 MB model to 1.5 GB in the first chunk of 2,048 tokens each, and to 0.5 GB while they shared one.
_MIN_CHUNK_TOKENS = 64
# What a pass costs per layer beside its weights, in bytes that could be read in that time: 20 us (the roofline's layer
# overhead) at the 620 GB/s that an M3 Ultra reaches.
_LAYER_BYTES = 12_000_000

Caches = list[Any] | None


class GroupedBatch:
    """Requests that run, at most `max_batch` in all groups, and those that wait for a place, in order.

    chunk_tokens: prompt tokens per step, shared by the prompts that are computed side by side.
    """

    def __init__(self, prepared: Prepared, *, stream: Any, max_batch: int, chunk_tokens: int) -> None:
        self._model, self._stream = prepared.model, stream
        self._eos_ids = prepared.info.eos_ids
        self._max_batch, self._chunk_tokens = max_batch, chunk_tokens
        layout = prepared.info.layout
        self._kv_bytes: Callable[[int], int] = grouping.kv_growth(layout)
        self._pass_bytes = prepared.active_bytes + _LAYER_BYTES * len(layout.layers)
        self._groups: list[Batch] = []
        self._group_of: dict[Job, Batch] = {}
        self._waiting: deque[tuple[Job, Caches]] = deque()  # bounded by the engine's requests
        # Every generator sets this limit and puts back what it found: the first to go would take it from the others.
        self._unwired: int | None = maybe_set_recommended_wired_limit()

    def __len__(self) -> int:
        return len(self._group_of) + len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of KV, padding and growth room included."""
        waiting = sum(int(cache.nbytes) for _, caches in self._waiting for cache in caches or ())
        return waiting + sum(group.nbytes for group in self._groups)

    def build(self, job: Job) -> Caches:
        """The job's received KV as caches, None where it has none. The received buffers are let go."""
        if job.kv is None:
            return None
        caches = mlx_cache.build(self._model, job.kv)
        job.kv = None
        return caches

    def insert(self, job: Job, caches: Caches) -> None:
        """Let the job join at the next step, or as soon as there is a place: its last token on top of `caches`, or its
        whole prompt."""
        if len(self) < self._max_batch:
            self._place(job, caches)
        else:
            self._waiting.append((job, caches))

    def remove(self, job: Job) -> None:
        """Forget the job at whatever stage it is; fine if it is not here."""
        if (group := self._group_of.pop(job, None)) is not None:
            group.remove(job)
            self._drop_empty()
        else:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not job)

    def step(self) -> list[tuple[Job, Token]]:
        """One token for every decoding job, and one chunk for every job still reading its prompt."""
        while self._waiting and len(self._group_of) < self._max_batch:
            self._place(*self._waiting.popleft())
        side_by_side = max(1, sum(group.reading for group in self._groups))
        chunk = max(self._chunk_tokens // side_by_side, min(self._chunk_tokens, _MIN_CHUNK_TOKENS))
        return [handed_out for group in self._groups for handed_out in group.step(chunk)]

    def forget(self, jobs: Sequence[Job]) -> None:
        """Drop jobs whose last token was handed out."""
        for job in jobs:
            self._group_of.pop(job).forget(job)
        if jobs:
            self._drop_empty()

    def close(self) -> None:
        """Let go of every job and cache, and of wired memory; of no use afterwards. Calling it twice is fine."""
        self._waiting.clear()
        self._group_of.clear()
        for group in self._groups:
            group.close()
        self._groups.clear()
        if self._unwired is not None:
            mx.synchronize(self._stream)
            mx.set_wired_limit(self._unwired)
            self._unwired = None

    def _place(self, job: Job, caches: Caches) -> None:
        rows = [group.rows for group in self._groups]
        index = grouping.choose(rows, row(job), self._kv_bytes, self._pass_bytes)
        if index is not None:
            group = self._groups[index]
            group.insert(job, caches)
        else:
            group = Batch(self._model, stream=self._stream, eos_ids=self._eos_ids, max_batch=self._max_batch)
            group.insert(job, caches)
            self._groups.append(group)
        self._group_of[job] = group

    def _drop_empty(self) -> None:
        for group in [group for group in self._groups if not len(group)]:
            self._groups.remove(group)
            group.close()
