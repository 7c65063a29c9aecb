"""A decode engine that computes nothing: takes real KV off the wire and hands out tokens when a machine would.

One thread plays the machine: it takes in what has arrived, reads one chunk of every prompt that it must compute itself,
then takes one step of the batch, each in its predicted time. Moments are absolute and follow each other, so that being
late once does not add up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest, DecodeTiming, EngineInfo, Listener, Token
from disagg.engines.model.text import PromptTokenizer
from disagg.engines.simulated import model as simulated_model
from disagg.engines.simulated.model import sleep_until
from disagg.errors import Cancelled, LayoutMismatch, Overloaded, RequestError
from disagg.kv.arena import allocate_numpy
from disagg.kv.received import ReceivedKV
from disagg.planning.decode import ingest, step

MAX_REQUESTS = 1024


@dataclass(slots=True, eq=False)
class _Job:
    """One request. `lock` is held during every call to the listener; `open`: it may be called. `chunks`: seconds of
    each chunk that this machine must still read, None until the job has been taken in."""

    request: DecodeRequest
    listener: Listener
    answer: Iterator[Token]
    timing: DecodeTiming
    kv: ReceivedKV | None
    chunks: list[float] | None = None
    written: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    open: bool = True

    @property
    def context(self) -> int:
        return len(self.request.tokens) + self.written


class SimulatedDecodeEngine:
    """See base.DecodeEngine. `hardware`: the machine it plays; `source`: see simulated_model.load."""

    def __init__(self, source: str | Path, context: int, options: EngineOptions, hardware: str) -> None:
        self._model = simulated_model.load(source, context, options, hardware)
        self._wake = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self._closed = False
        self._after_step: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="simulated-decode", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._model.info

    @property
    def tokenizer(self) -> PromptTokenizer:
        return self._model.tokenizer

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that the requests here hold, or would hold on the machine."""
        with self._wake:
            jobs = list(self._jobs.values())
        return sum(kv.nbytes if (kv := job.kv) else self.info.layout.nbytes(job.context) for job in jobs)

    @property
    def running(self) -> int:
        with self._wake:
            return len(self._jobs)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def warm_up(self) -> None:
        """There is nothing that only the first request would pay for."""

    def allocate(self, nbytes: int) -> Any:
        """See DecodeEngine."""
        return allocate_numpy(nbytes)

    def submit(self, request: DecodeRequest, listener: Listener) -> None:
        """Queue a request. RequestError for an id already here, LayoutMismatch where the KV is not this model's or not
        of tokens[:-1], Overloaded when too many wait, Cancelled after close."""
        if request.kv is not None:
            request.kv.layout.require_same(self.info.layout, mine="the transfer", theirs="the decode engine")
            if request.kv.tokens != len(request.tokens) - 1:
                raise LayoutMismatch(f"the KV covers {request.kv.tokens} of {len(request.tokens)} prompt tokens")
        timing = DecodeTiming(submitted=time.monotonic())
        answer = self._model.answer(request.tokens, request.sampling)
        job = _Job(request, listener, answer, timing, request.kv)
        with self._wake:
            if self._closed:
                raise Cancelled("the simulated decode engine is closed", "start the server again")
            if request.id in self._jobs:
                raise RequestError(f"request {request.id} is already running", "give every request an id of its own")
            if len(self._jobs) >= MAX_REQUESTS:
                raise Overloaded(f"{MAX_REQUESTS} requests are already in the decode engine", "try again later")
            self._jobs[request.id] = job
            self._wake.notify()

    def after_step(self, call: Callable[[], None]) -> None:
        """See DecodeEngine."""
        self._after_step = call

    def cancel(self, request_id: str) -> None:
        """See DecodeEngine."""
        with self._wake:
            job = self._jobs.pop(request_id, None)
        if job is not None:
            with job.lock:  # waits for a call to the listener that has already begun
                job.open = False

    def logits(self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None) -> list[list[float]]:
        """There are none: ModelError."""
        raise simulated_model.no_logits()

    def close(self) -> None:
        """Stop the thread; running requests get Cancelled. Calling it twice is fine."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    # Everything below runs on the thread. `moment`: when the machine has done all that it was given so far.

    def _run(self) -> None:
        moment = 0.0
        while jobs := self._take():
            moment = max(moment, jobs[0].timing.submitted)
            for job in jobs:
                moment = self._prepare(job, moment)
            if writing := [job for job in jobs if not job.chunks]:
                moment += self._step_s(writing)
                sleep_until(moment)
                for job in writing:
                    self._deliver(job)
                self._after_step()
        self._fail_all()

    def _take(self) -> list[_Job]:
        """The requests of the batch; none once the engine is closed. Sleeps until there are some."""
        with self._wake:
            while not self._jobs and not self._closed:
                self._wake.wait()
            return [] if self._closed else list(self._jobs.values())[: self._model.options.max_batch]

    def _prepare(self, job: _Job, moment: float) -> float:
        """Take in a new request, and read one chunk of its prompt if there is one to read."""
        if job.chunks is None:
            job.timing.started = time.monotonic()
            moment += ingest(job.kv.nbytes) if job.kv else 0.0
            sleep_until(moment)
            job.timing.ingested = time.monotonic()
            job.timing.computed_prompt_tokens = 1 if job.kv else len(job.request.tokens)
            job.chunks = [] if job.kv else self._chunks(len(job.request.tokens) - 1)
            job.kv = None
        if job.chunks:
            moment += job.chunks.pop(0)
            sleep_until(moment)
        return moment

    def _chunks(self, tokens: int) -> list[float]:
        ends = self._model.prefill(tokens).chunk_ends
        return [end - begin for begin, end in zip((0.0, *ends), ends, strict=False)]

    def _step_s(self, jobs: Sequence[_Job]) -> float:
        context = sum(job.context for job in jobs) // len(jobs)
        return step(self._model.device, self._model.shape, context, self._model.options.dtype, len(jobs))

    def _deliver(self, job: _Job) -> None:
        """Hand out the job's next token; with its last one it has already left the engine."""
        token, now = next(job.answer), time.monotonic()
        job.written += 1
        job.timing.first_token = job.timing.first_token or now
        if token.finish:
            with self._wake:
                if self._jobs.get(job.request.id) is job:
                    del self._jobs[job.request.id]
        with job.lock:
            if job.open:
                job.listener.on_tokens((token,), job.timing)

    def _fail_all(self) -> None:
        with self._wake:
            jobs = list(self._jobs.values())
            self._jobs.clear()
        for job in jobs:
            with job.lock:
                if job.open:
                    job.open = False
                    job.listener.on_error(Cancelled("the simulated decode engine was closed", "send the request again"))
