"""The running batch: requests in, tokens out, on mlx-lm's BatchGenerator. Used by the engine's thread only.

BatchGenerator runs one step ahead: a step first starts computing the next token and then hands out the last one, so
every request costs one step that nobody reads, and samplers are called one token before their token is seen.
All sequences of one batch are left-padded to the longest; several `Batch`es side by side would group them by length.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from disagg.engines import mlx_cache, mlx_sampling
from disagg.engines.base import DecodeTiming, FinishReason, Listener, Sampling, Token
from disagg.engines.mlx_sampling import RepetitionPenalty
from disagg.kv.received import ReceivedKV

# Prompts that may be computed side by side, right-padded, while others decode.
_PREFILL_BATCH = 8
# Prompts that are computed side by side share the prompt tokens of one step, but each gets this many. On the CPU
# backend attention makes [prompts, heads, chunk, context] scores: eight prompts of 4,000 tokens took the process of a
# 1 MB model to 1.5 GB in the first chunk of 2,048 tokens each, and to 0.5 GB while they shared one.
_MIN_CHUNK_TOKENS = 64
# Freed buffers that mlx keeps for reuse while requests run. Its own bound is 32 MiB on Linux and nearly all memory on a
# Mac.
_MAX_CACHE_BYTES = 1 << 30


@dataclass(slots=True, eq=False)
class Job:
    """One request inside the engine. `lock` is held during every call to the listener; `open`: it may be called."""

    id: str
    tokens: list[int]
    sampling: Sampling
    kv: ReceivedKV | None  # until the caches are built
    listener: Listener
    timing: DecodeTiming = field(default_factory=DecodeTiming)
    lock: threading.RLock = field(default_factory=threading.RLock)
    open: bool = True
    uid: int | None = None
    penalty: RepetitionPenalty | None = None


class Batch:
    """Requests that decode together. `max_batch`: how many; `chunk_tokens`: prompt tokens per prefill step, shared by
    the prompts that are computed side by side."""

    def __init__(self, model: Any, *, stream: Any, eos_ids: frozenset[int], max_batch: int, chunk_tokens: int) -> None:
        self._model = model
        self._jobs: dict[int, Job] = {}
        self._reading: set[int] = set()  # jobs whose prompt is computed here and not yet to its end
        self._chunk_tokens = chunk_tokens
        self._stop_at_eos = StopSequences([(token,) for token in sorted(eos_ids)])
        self._never_stop = StopSequences()
        self._generator: Any = BatchGenerator(
            model,
            sampler=mlx_sampling.greedy,
            completion_batch_size=max_batch,
            prefill_batch_size=min(_PREFILL_BATCH, max_batch),
            prefill_step_size=chunk_tokens,
            stream=stream,
        )

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> list[Job]:
        return list(self._jobs.values())

    @property
    def nbytes(self) -> int:
        """Bytes of KV, padding and growth room included."""
        return int(self._generator.prompt_cache_nbytes) if self._jobs else 0

    def build(self, job: Job) -> list[Any] | None:
        """The job's received KV as caches, None where it has none. The received buffers are let go."""
        if job.kv is None:
            return None
        caches = mlx_cache.build(self._model, job.kv)
        job.kv = None
        return caches

    def insert(self, job: Job, caches: list[Any] | None) -> None:
        """Let the job join at the next step: its last token on top of `caches`, or its whole prompt."""
        handed_over = caches is not None
        job.penalty = mlx_sampling.repetition_penalty(job.sampling)
        (job.uid,) = self._generator.insert(
            [job.tokens[-1:] if handed_over else job.tokens],
            max_tokens=[job.sampling.max_tokens],
            caches=[caches],
            all_tokens=[job.tokens[:-1] if handed_over else []],  # a copy: the generator appends to it
            samplers=[mlx_sampling.sampler(job.sampling)],
            logits_processors=[[job.penalty] if job.penalty else []],
            stop_sequences=[self._never_stop if job.sampling.ignore_eos else self._stop_at_eos],
        )
        self._jobs[job.uid] = job
        if not handed_over:
            self._reading.add(job.uid)

    def remove(self, job: Job) -> None:
        """Forget the job at whatever stage it is; fine if it is not here."""
        if job.uid is not None and self._jobs.pop(job.uid, None) is not None:
            self._reading.discard(job.uid)
            self._generator.remove([job.uid])

    def step(self) -> list[tuple[Job, Token]]:
        """One token for every decoding job, and one chunk for every job still reading its prompt."""
        side_by_side = max(1, min(len(self._reading), _PREFILL_BATCH))
        self._generator.prefill_step_size = max(
            self._chunk_tokens // side_by_side, min(self._chunk_tokens, _MIN_CHUNK_TOKENS)
        )
        read, generated = self._generator.next()
        for progress in read:
            self._count(progress)
        return [(self._jobs[r.uid], self._token(r)) for r in generated]

    def forget(self, jobs: Sequence[Job]) -> None:
        """Drop jobs whose last token was handed out; the generator has let go of them itself."""
        for job in jobs:
            if job.uid is not None:
                self._jobs.pop(job.uid, None)

    def close(self) -> None:
        """Let go of every job and cache, and of wired memory; the batch is of no use afterwards.
        Calling it twice is fine."""
        self._jobs.clear()
        if self._generator is not None:
            self._generator.close()
            self._generator = None

    def _count(self, progress: Any) -> None:
        """Prompt tokens as the generator fed them to the model: chunk by chunk, then the last one by itself."""
        if progress.end_of_prompt:
            self._reading.discard(progress.uid)
        timing = self._jobs[progress.uid].timing
        timing.computed_prompt_tokens = (
            timing.computed_prompt_tokens + 1 if progress.end_of_prompt else progress.progress[0]
        )

    def _token(self, response: Any) -> Token:
        job = self._jobs[response.uid]
        row = mlx_sampling.read_row(response.logprobs)
        if job.penalty is not None:
            row = mlx_sampling.log_softmax(mlx_sampling.as_float(mlx_sampling.read_row(job.penalty.raw.popleft())))
        chosen = int(response.token)
        top = mlx_sampling.top_logprobs(row, job.sampling.logprobs) if job.sampling.logprobs else ()
        finish: FinishReason | None = response.finish_reason
        return Token(chosen, float(mlx_sampling.as_float(row[chosen : chosen + 1])[0]), top, finish)


def bound_memory() -> None:
    """Let mlx keep at most _MAX_CACHE_BYTES of freed buffers while requests run."""
    allowed = mx.set_cache_limit(_MAX_CACHE_BYTES)
    mx.set_cache_limit(min(allowed, _MAX_CACHE_BYTES))


def release_memory() -> None:
    """Give freed buffers back to the system; called when no request is left."""
    mx.clear_cache()
