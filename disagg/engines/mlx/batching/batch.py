"""One group of requests that decode in one pass, on mlx-lm's BatchGenerator. Used by the engine's thread only.

BatchGenerator runs one step ahead: a step first starts computing the next token and then returns the previous one, so
every request computes one token that is never returned, and samplers are called one step before their token is.
All sequences of one batch are left-padded to the longest; `groups` runs several batches side by side.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from disagg.api.events import FinishReason
from disagg.engines.base import Token
from disagg.engines.mlx import sampling as mlx_sampling
from disagg.engines.mlx.adjust import adjustment, constrained
from disagg.engines.mlx.batching.grouping import Row
from disagg.engines.mlx.batching.job import Job
from disagg.engines.mlx.held import covers, snapshot

# Prompts that may be computed together, right-padded, while other requests decode.
_PREFILL_BATCH = 8


class Float32Logits:
    """A model whose logits are float32, whatever it computes in.

    All rows of a batch have one dtype, and one request's penalties are float32: without this they would make the
    probabilities of its neighbours finer, and so change their answers. In bfloat16 many of the likeliest tokens are
    equally likely, too.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._model(*arguments, **options).astype(mx.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Batch:
    """At most `max_batch` requests that decode together."""

    def __init__(self, model: Any, *, stream: Any, eos_ids: frozenset[int], max_batch: int) -> None:
        self._jobs: dict[int, Job] = {}
        self._reading: set[int] = set()  # jobs whose prompt is being computed here
        self._stop_at_eos = StopSequences([(token,) for token in sorted(eos_ids)])
        self._never_stop = StopSequences()
        self._generator: Any = BatchGenerator(
            Float32Logits(model),
            sampler=mlx_sampling.greedy,
            completion_batch_size=max_batch,
            prefill_batch_size=min(_PREFILL_BATCH, max_batch),
            stream=stream,
        )

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def reading(self) -> int:
        """The number of prompts of which the next step computes a chunk."""
        return min(len(self._reading), _PREFILL_BATCH)

    @property
    def constrained(self) -> bool:
        """Whether its answers must have a form."""
        return any(job.constraint is not None for job in self._jobs.values())

    @property
    def rows(self) -> list[Row]:
        return [job.row for job in self._jobs.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of KV, with padding and room for growth."""
        return int(self._generator.prompt_cache_nbytes) if self._jobs else 0

    def insert(self, job: Job, caches: list[Any] | None) -> None:
        """Add the job at the next step: the tokens that `caches` do not cover on top of them."""
        job.adjustment = adjustment(job.sampling, job.answered, job.constraint)
        sampler = mlx_sampling.sampler(job.sampling, job.answered)
        if job.constraint is not None:
            sampler = constrained(sampler, job.constraint)
        (job.uid,) = self._generator.insert(
            [job.tokens[job.covered :]],
            max_tokens=[job.sampling.max_tokens - job.answered],
            caches=[caches],
            all_tokens=[job.tokens[: job.covered]],  # a copy, to which the generator appends
            samplers=[sampler],
            logits_processors=[[job.adjustment] if job.adjustment else []],
            stop_sequences=[self._never_stop if job.sampling.ignore_eos else self._stop_at_eos],
        )
        self._jobs[job.uid] = job
        if job.covered + 1 < len(job.tokens):
            self._reading.add(job.uid)

    def remove(self, job: Job) -> None:
        """Drop the job at any stage; no effect if it is not in this batch. Sets `job.ended` if it was decoding."""
        if job.uid is not None and self._jobs.pop(job.uid, None) is not None:
            self._reading.discard(job.uid)
            taken = self._generator.remove([job.uid], return_prompt_caches=job.written > 0 and job.finite)
            if job.uid in taken:
                caches, tokens = taken[job.uid]
                job.ended = list(tokens), caches

    def step(self, chunk_tokens: int) -> list[tuple[Job, Token]]:
        """One token for every decoding job, and a chunk of each prompt that is being computed. chunk_tokens: of such a
        chunk."""
        self._generator.prefill_step_size = chunk_tokens
        read, generated = self._generator.next()
        for progress in read:
            self._count(progress)
        return [(self._jobs[r.uid], self._token(r)) for r in generated]

    def drop_finished(self, job: Job) -> None:
        """Drop a job whose last token was returned; the generator has dropped it already."""
        if job.uid is not None:
            self._jobs.pop(job.uid, None)

    def close(self) -> None:
        """Drop every job and cache; the batch cannot be used afterwards. Safe to call twice."""
        self._jobs.clear()
        if self._generator is not None:
            self._generator.close()
            self._generator = None

    def _count(self, progress: Any) -> None:
        """Count prompt tokens as the generator reports them: chunk by chunk, then the last one by itself."""
        job = self._jobs[progress.uid]
        if progress.end_of_prompt:
            self._reading.discard(progress.uid)
            job.timing.computed_prompt_tokens += 1
            return
        job.timing.computed_prompt_tokens = progress.progress[0]
        if progress.end_of_segment:
            self._take_snapshot(job)

    def _take_snapshot(self, job: Job) -> None:
        """Before the job's last prompt token: only then are its caches by themselves."""
        caches, tokens = self._generator.extract_cache([job.uid])[job.uid]
        if covers(caches, len(tokens)) and (taken := snapshot(caches, len(tokens))) is not None:
            job.snapshots[len(tokens)] = taken

    def _token(self, response: Any) -> Token:
        job = self._jobs[response.uid]
        job.written += 1
        row = mlx_sampling.read_row(response.logprobs)
        if job.adjustment is not None:
            row = mlx_sampling.log_softmax(mlx_sampling.read_row(job.adjustment.raw.popleft()))
        chosen = int(response.token)
        top = mlx_sampling.top_logprobs(row, job.sampling.logprobs) if job.sampling.logprobs else ()
        finish: FinishReason | None = response.finish_reason
        logprob = float(row[chosen])
        job.finite = job.finite and not math.isnan(logprob)
        if finish and job.finite:
            job.ended = list(response.all_tokens), response.prompt_cache
        return Token(chosen, logprob, top, finish)
