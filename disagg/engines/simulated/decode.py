"""A decode engine without a model: it accepts received KV and produces tokens at the predicted times.

The batch simulates the machine: it ingests new requests, computes one chunk of every prompt without KV, then takes one
step of all answers, each in its predicted time. Times are absolute, so that a delay does not accumulate.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from disagg.config import EngineOptions
from disagg.engines.base import Token
from disagg.engines.base.prefill import no_scores
from disagg.engines.decoding import Caches, DecodeEngine, Job
from disagg.engines.simulated import model as simulated_model
from disagg.engines.simulated.model import END, CountedKV, SimulatedModel, sleep_until
from disagg.errors import DisaggError, ModelError
from disagg.kv.arena import allocate_numpy
from disagg.kv.received import ReceivedKV
from disagg.planning.times import ingest, step

PIECE_S = 0.5  # the longest piece of work without a beat


class SimulatedDecodeEngine(DecodeEngine):
    """A DecodeEngine. hardware: the simulated machine. source: see simulated_model.load. KV is not audited."""

    _batch: SimulatedBatch

    def __init__(self, source: str | Path, context: int, options: EngineOptions, hardware: str) -> None:
        self._model = model = simulated_model.load(source, context, options, hardware)
        held = CountedKV(model.info, options.max_kv_bytes)
        backend = SimulatedBackend(model, held, self._beat)
        super().__init__(lambda: nullcontext(backend), name="simulated-decode")

    @property
    def kv_bytes(self) -> int:
        """Bytes of received KV, and of the KV that the running requests would have on the machine."""
        with self._lock:
            jobs = list(self._jobs.values())
        return sum(kv.nbytes if (kv := job.kv) else self.info.layout.nbytes(_context(job)) for job in jobs)

    def warm_up(self) -> None:
        """Nothing to do: the first request is as fast as any other."""

    def allocate(self, nbytes: int) -> Any:
        return allocate_numpy(nbytes)

    def logits(
        self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None, *, chunk_tokens: int | None = None
    ) -> Any:
        """Raises ModelError: there are none."""
        raise simulated_model.no_logits()

    def _beat(self) -> None:
        self.on_beat()  # which may have been set since


class SimulatedBackend:
    """A Backend. on_beat: called after each piece of work."""

    def __init__(self, model: SimulatedModel, counted: CountedKV, on_beat: Callable[[], None]) -> None:
        self._model, self._counted, self._on_beat = model, counted, on_beat
        self.info, self.tokenizer, self.held = model.info, model.tokenizer, counted.store

    def new_batch(self) -> SimulatedBatch:
        return SimulatedBatch(self._model, self._on_beat)

    def scoring(self, tokens: Sequence[int], top: int) -> Any:
        """Raises CapabilityMissing: there are no logits."""
        raise no_scores(self.info.backend)

    def hold(self, job: Job, tokens: list[int], caches: Any) -> None:
        prompt = job.request.tokens
        self._counted.hold(prompt, tokens[len(prompt) :], job.request.salt)

    def release_memory(self) -> None:
        """Nothing is kept."""

    def trim_memory(self) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class _Row:
    """One request in the batch. chunks: seconds for each chunk of the prompt that is still to be computed. written: the
    tokens so far."""

    answer: Iterator[Token]
    chunks: deque[float]
    written: list[int] = field(default_factory=list)


class SimulatedBatch:
    """A Batch whose work is to sleep. The first `max_batch` of its requests run, the others wait."""

    def __init__(self, model: SimulatedModel, on_beat: Callable[[], None]) -> None:
        self._model = model
        self._on_beat = on_beat
        self._rows: dict[Job, _Row] = {}
        self._busy_until = 0.0  # when the simulated machine has finished all its work so far

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return sum(self._model.info.layout.nbytes(_context(job)) for job in self._rows)

    def build(self, job: Job) -> None:
        """Ingest the received KV."""
        if not self._rows:
            self._busy_until = max(self._busy_until, job.timing.submitted)
        if job.kv is not None:
            self._work(ingest(job.kv.nbytes))

    @property
    def due(self) -> bool:
        return bool(self._rows)

    def receive(self, job: Job) -> None:
        raise ModelError("a simulated engine does not compute a part of the layers")

    def compute_tail(self) -> None:
        return None

    def insert(self, job: Job, caches: Caches) -> None:
        request, held = job.request, job.held.tokens if job.held is not None else 0
        prompt = request.tokens[: len(request.tokens) - request.answered]
        answer = self._model.answer(prompt, request.sampling, request.answered, request.constraint)
        chunks = self.chunks(held, len(request.tokens) - 1) if job.kv is None else ()
        job.timing.computed_prompt_tokens = len(request.tokens) - held if job.kv is None else 1
        self._rows[job] = _Row(answer, deque(chunks))

    def remove(self, job: Job) -> None:
        if (row := self._rows.pop(job, None)) is not None and row.written:
            job.ended = [*job.request.tokens, *row.written], None

    def step(self) -> list[tuple[Job, Token]]:
        running = list(islice(self._rows.items(), self._model.options.max_batch))
        for _, row in running:
            if row.chunks:
                self._work(row.chunks.popleft())
                self._on_beat()
        decoding = [(job, row) for job, row in running if not row.chunks]
        if not decoding:
            return []
        context = sum(_context(job) for job, _ in decoding) // len(decoding)
        options = self._model.options
        self._work(step(self._model.device, self._model.shape, context, options.dtype, len(decoding)))
        return [(job, _next(job, row)) for job, row in decoding]

    def drop_finished(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.remove(job)

    def close(self) -> None:
        self._rows.clear()

    def chunks(self, held: int, tokens: int) -> list[float]:
        """Seconds of each chunk of a prompt of which the first tokens are held."""
        before, ends = self._model.prefill(held).seconds, self._model.prefill(tokens).chunk_ends
        spans = (end - max(begin, before) for begin, end in zip((0.0, *ends), ends, strict=False))
        return [span for span in spans if span > 0]

    def _work(self, seconds: float) -> None:
        """Sleep until this work is done, with a beat as often as the pieces of a real engine's work end."""
        self._busy_until += seconds
        while self._busy_until - time.monotonic() > PIECE_S:
            time.sleep(PIECE_S)
            self._on_beat()
        sleep_until(self._busy_until)


def _next(job: Job, row: _Row) -> Token:
    try:
        token = next(row.answer)
    except DisaggError as error:  # the answer cannot keep its form
        job.error = error
        return Token(END, 0.0)
    job.written += 1
    row.written.append(token.id)
    return token


def _context(job: Job) -> int:
    return len(job.request.tokens) + job.written
