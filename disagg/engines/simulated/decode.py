"""A decode engine without a model: it accepts received KV and produces tokens at the predicted times.

The batch simulates the machine: it ingests new requests, computes a piece of a split's tail, one chunk of every prompt
without KV, then takes one step of all answers, each in its predicted time. Times are absolute, so that a delay does not
accumulate.
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
from disagg.engines.decoding.tail import Tail, TailPace, Tails
from disagg.engines.model.bans import bans
from disagg.engines.simulated import model as simulated_model
from disagg.engines.simulated.model import END, CountedKV, SimulatedModel, sleep_until
from disagg.errors import DisaggError
from disagg.kv.arena import allocate_numpy
from disagg.kv.arriving import ArrivingKV, Chunk
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


class SimulatedTail(Tail):
    """The last layers of a prompt. work: simulates so many seconds of it."""

    def __init__(self, arriving: ArrivingKV, model: SimulatedModel, work: Callable[[float], None]) -> None:
        split = model.info.split
        first = split.layers if arriving.layers is None else arriving.layers
        super().__init__(arriving, split.layers - first)
        self._model, self._work, self._computed = model, work, range(first, split.layers)
        layout = model.info.layout
        self._nbytes = layout.nbytes(arriving.tokens) - split.head(layout, first).nbytes(arriving.tokens)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def _compute(self, chunk: Chunk, begin: int, end: int) -> None:
        self._work(self._model.piece(end, range(begin, end), self._computed).seconds)


class SimulatedBatch:
    """A Batch whose work is to sleep. The first `max_batch` of its requests run, the others wait."""

    def __init__(self, model: SimulatedModel, on_beat: Callable[[], None]) -> None:
        self._model = model
        self._on_beat = on_beat
        self._rows: dict[Job, _Row] = {}
        self._tails = Tails(self._tail, TailPace(model.options.chunk_tokens, model.info.split.layers))
        self._busy_until = 0.0  # when the simulated machine has finished all its work so far

    def __len__(self) -> int:
        return len(self._rows) + len(self._tails)

    @property
    def nbytes(self) -> int:
        return self._tails.nbytes + sum(self._model.info.layout.nbytes(_context(job)) for job in self._rows)

    @property
    def due(self) -> bool:
        return bool(self._rows) or self._tails.due(answers=self._answers)

    @property
    def _answers(self) -> bool:
        return any(not row.chunks for row in self._rows.values())

    def receive(self, job: Job) -> None:
        self._tails.add(job)

    def compute_tail(self) -> Job | None:
        return self._tails.compute(answers=self._answers)

    def build(self, job: Job) -> None:
        """Ingest the received KV. Of a head that has failed, what had arrived whole."""
        if not self._rows:
            self._busy_until = max(self._busy_until, job.timing.submitted)
        kv = job.kv if job.arriving is None else job.arriving.partial()
        if kv is not None:
            self._work(ingest(kv.nbytes))
        job.covered = kv.tokens if kv is not None else job.held.tokens if job.held is not None else 0
        if job.arriving is not None and job.arriving.outcome != "complete":
            job.timing.resumed_at = job.covered

    def insert(self, job: Job, caches: Caches) -> None:
        request = job.request
        prompt = request.tokens[: len(request.tokens) - request.answered]
        banned = bans(request.sampling, (END,), request.bad_words, request.tokens[len(prompt) :])
        answer = self._model.answer(prompt, request.sampling, request.answered, request.constraint, banned)
        job.timing.computed_prompt_tokens = len(request.tokens) - job.covered
        self._rows[job] = _Row(answer, deque(self.chunks(job.covered, len(request.tokens) - 1)))

    def remove(self, job: Job) -> None:
        self._tails.remove(job)
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
        self._tails.clear()

    def chunks(self, held: int, tokens: int) -> list[float]:
        """Seconds of each chunk of a prompt of which the first tokens are held."""
        before, ends = self._model.prefill(held).seconds, self._model.prefill(tokens).chunk_ends
        spans = (end - max(begin, before) for begin, end in zip((0.0, *ends), ends, strict=False))
        return [span for span in spans if span > 0]

    def _tail(self, job: Job, arriving: ArrivingKV) -> SimulatedTail:
        return SimulatedTail(arriving, self._model, self._work_now)

    def _work_now(self, seconds: float) -> None:
        """The same for work that begins when it is there: a machine without answers has been idle before."""
        if not self._rows:
            self._busy_until = max(self._busy_until, time.monotonic())
        self._work(seconds)

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
