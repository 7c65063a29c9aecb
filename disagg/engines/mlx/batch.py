"""A group of requests that decode in one pass, on mlx-lm's BatchGenerator. Used by the engine's thread only.

BatchGenerator runs one step ahead: a step first starts computing the next token and then returns the previous one, so
every request computes one token that is never returned, and samplers are called one step before their token is.
All sequences of one batch are left-padded to the longest; `groups` runs several batches side by side.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from disagg.api.events import FinishReason
from disagg.engines.base import Token
from disagg.engines.decoding import Caches, Job
from disagg.engines.mlx import sampling as mlx_sampling
from disagg.engines.mlx.passes import Row
from disagg.engines.mlx.prefix_cache import covers, snapshot
from disagg.engines.mlx.sampling import Adjustment, adjustment, constrained
from disagg.engines.model.bans import bans, ends_of

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


class Group:
    """At most `max_batch` requests that decode together."""

    def __init__(self, model: Any, *, stream: Any, eos_ids: frozenset[int], max_batch: int) -> None:
        self._jobs: dict[int, Job] = {}  # by their numbers in the generator
        self._adjustments: dict[int, Adjustment] = {}  # the same numbers
        self._reading: set[int] = set()  # jobs whose prompt is being computed here
        self._eos_ids = eos_ids
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
    def answering(self) -> int:
        """The number of requests that are in their answers."""
        return len(self._jobs) - len(self._reading)

    @property
    def reads_tokens(self) -> bool:
        """Whether its steps wait for their tokens."""
        return any(map(reads_tokens, self._jobs.values()))

    @property
    def rows(self) -> list[Row]:
        return [row_of(job) for job in self._jobs.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of KV, with padding and room for growth."""
        return int(self._generator.prompt_cache_nbytes) if self._jobs else 0

    def insert(self, job: Job, caches: Caches) -> None:
        """Add the job at the next step: the tokens that `caches` do not cover on top of them."""
        request = job.request
        answer = request.tokens[len(request.tokens) - request.answered :]
        banned = bans(request.sampling, self._eos_ids, request.bad_words, answer)
        adjusts = adjustment(request.sampling, request.answered, request.constraint, banned)
        sampler = mlx_sampling.sampler(request.sampling, request.answered)
        if request.constraint is not None:
            sampler = constrained(sampler, request.constraint, banned)
        (uid,) = self._generator.insert(
            [list(request.tokens[job.covered :])],
            max_tokens=[request.sampling.max_tokens - request.answered],
            caches=[caches],
            all_tokens=[list(request.tokens[: job.covered])],  # to which the generator appends
            samplers=[sampler],
            logits_processors=[[adjusts] if adjusts else []],
            stop_sequences=[_stop_at(ends_of(request.sampling, self._eos_ids))],
        )
        self._jobs[uid] = job
        if adjusts:
            self._adjustments[uid] = adjusts
        if job.covered + 1 < len(request.tokens):
            self._reading.add(uid)

    def remove(self, job: Job) -> None:
        """Drop the job at any stage. Sets `job.ended` if it was in its answer."""
        uid = self._drop(job)
        self._reading.discard(uid)
        taken = self._generator.remove([uid], return_prompt_caches=job.written > 0 and job.finite)
        if uid in taken:
            caches, tokens = taken[uid]
            job.ended = list(tokens), caches

    def step(self, chunk_tokens: int) -> list[tuple[Job, Token]]:
        """One token for every decoding job, and a chunk of each prompt that is being computed. chunk_tokens: the most
        that a chunk has."""
        self._generator.prefill_step_size = chunk_tokens
        read, generated = self._generator.next()
        for progress in read:
            self._count(progress)
        return [(self._jobs[r.uid], self._token(r)) for r in generated]

    def drop_finished(self, job: Job) -> None:
        """Drop a job whose last token was returned; the generator has dropped it already."""
        self._drop(job)

    def close(self) -> None:
        """Drop every job and cache; the batch cannot be used afterwards. Safe to call twice."""
        self._jobs.clear()
        if self._generator is not None:
            self._generator.close()
            self._generator = None

    def _drop(self, job: Job) -> int:
        uid = next(uid for uid, one in self._jobs.items() if one is job)
        del self._jobs[uid]
        self._adjustments.pop(uid, None)
        return uid

    def _count(self, progress: Any) -> None:
        """Count prompt tokens as the generator reports them: chunk by chunk, then the last one by itself."""
        job = self._jobs[progress.uid]
        if progress.end_of_prompt:
            self._reading.discard(progress.uid)
            job.timing.computed_prompt_tokens += 1
            return
        job.timing.computed_prompt_tokens = progress.progress[0]
        if progress.end_of_segment:
            self._take_snapshot(job, progress.uid)

    def _take_snapshot(self, job: Job, uid: int) -> None:
        """Before the job's last prompt token: only then are its caches by themselves."""
        caches, tokens = self._generator.extract_cache([uid])[uid]
        if covers(caches, len(tokens)) and (taken := snapshot(caches, len(tokens))) is not None:
            job.snapshots[len(tokens)] = taken

    def _token(self, response: Any) -> Token:
        job = self._jobs[response.uid]
        job.written += 1
        chosen, wanted = int(response.token), job.request.sampling.logprobs
        adjusts = self._adjustments.get(response.uid)
        row = mlx_sampling.read_row(response.logprobs if adjusts is None else adjusts.raw.popleft())
        if adjusts is None:
            logprob = float(row[chosen])
        else:
            logprob = mlx_sampling.log_probability(row, chosen)
            row = mlx_sampling.log_softmax(row) if wanted else row
        top = mlx_sampling.top_logprobs(row, wanted) if wanted else ()
        finish: FinishReason | None = response.finish_reason
        if job.request.constraint is not None:
            job.error = job.request.constraint.error
        job.finite = job.finite and not math.isnan(logprob)
        if finish and job.finite:
            job.ended = list(response.all_tokens), response.prompt_cache
        return Token(chosen, logprob, top, finish)


def reads_tokens(job: Job) -> bool:
    """Whether each step of the job waits for its token, which decides what may follow."""
    return job.request.constraint is not None or any(len(word) > 1 for word in job.request.bad_words)


@lru_cache(64)
def _stop_at(ends: frozenset[int]) -> StopSequences:
    return StopSequences([(token,) for token in sorted(ends)])


def row_of(job: Job) -> Row:
    """The job as `passes` counts it: with its whole prompt, and the longest answer that it may have."""
    request = job.request
    return Row(len(request.tokens) + job.written, request.sampling.max_tokens - request.answered - job.written)
