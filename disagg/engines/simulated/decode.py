"""A decode engine without a model: it accepts received KV and produces tokens at the predicted times.

One thread simulates the machine: it ingests new requests, computes one chunk of every prompt without KV, then takes one
step of the batch, each in its predicted time. Times are absolute, so that a delay does not accumulate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest, DecodeTiming, EngineInfo, HeldKV, Listener, Token, require_room
from disagg.engines.model.text import PromptTokenizer
from disagg.engines.simulated import model as simulated_model
from disagg.engines.simulated.held import CountedKV
from disagg.engines.simulated.model import sleep_until
from disagg.errors import Cancelled, DisaggError, LayoutMismatch
from disagg.kv.arena import allocate_numpy
from disagg.kv.received import ReceivedKV
from disagg.planning.times import ingest, step

PIECE_S = 0.5  # the longest piece of work without a beat


@dataclass(slots=True, eq=False)
class _Job:
    """One request. chunks: seconds for each chunk of the prompt that is still to be computed, None until the request is
    ingested. written: tokens so far. held: of its prompt's first tokens, those that were held. lock: held during calls
    to the listener. open: the listener may be called."""

    request: DecodeRequest
    listener: Listener
    answer: Iterator[Token]
    timing: DecodeTiming
    kv: ReceivedKV | None
    chunks: list[float] | None = None
    written: list[int] = field(default_factory=list)
    held: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    open: bool = True

    @property
    def context(self) -> int:
        return len(self.request.tokens) + len(self.written)

    def fail(self, error: Exception) -> None:
        with self.lock:
            if self.open:
                self.open = False
                self.listener.on_error(error)


class SimulatedDecodeEngine:
    """See base.DecodeEngine. hardware: the simulated machine. source: see simulated_model.load. KV is not audited."""

    def __init__(self, source: str | Path, context: int, options: EngineOptions, hardware: str) -> None:
        self.on_beat: Callable[[], None] = lambda: None
        self._model = simulated_model.load(source, context, options, hardware)
        self._held = CountedKV(self._model.info.layout, options.max_kv_bytes)
        self._holding = threading.Lock()
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
        """Bytes of received KV, and of the KV that the running requests would have on the machine."""
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
        """Nothing to do: the first request is as fast as any other."""

    def allocate(self, nbytes: int) -> Any:
        return allocate_numpy(nbytes)

    def submit(self, request: DecodeRequest, listener: Listener) -> None:
        """Queue a request. RequestError if its id is in use, LayoutMismatch if the KV is not this model's or not of
        the tokens that it must cover, Overloaded if there are MAX_REQUESTS, Cancelled after close."""
        held = request.held.tokens if request.held is not None else 0
        if (kv := request.kv) is not None:
            kv.layout.require_same(self.info.layout, mine="the transfer", theirs="the decode engine")
            if (kv.start, kv.tokens) != (held, len(request.tokens) - 1):
                raise LayoutMismatch(
                    f"the KV covers tokens [{kv.start}, {kv.tokens}), "
                    f"but [{held}, {len(request.tokens) - 1}) are needed"
                )
        timing = DecodeTiming(submitted=time.monotonic())
        prompt = request.tokens[: len(request.tokens) - request.answered]
        answer = self._model.answer(prompt, request.sampling, request.answered, request.constraint)
        job = _Job(request, listener, answer, timing, kv, held=held)
        with self._wake:
            if self._closed:
                raise Cancelled("the simulated decode engine is closed", "start the server again")
            require_room(self._jobs, request.id)
            self._jobs[request.id] = job
            self._wake.notify()

    def after_step(self, call: Callable[[], None]) -> None:
        self._after_step = call

    def cancel(self, request_id: str, dropped: Callable[[], None] = lambda: None) -> None:
        with self._wake:
            job = self._jobs.pop(request_id, None)
        if job is not None:
            with job.lock:  # waits for a call to the listener that has already begun
                job.open = False
            self._hold(job)
        dropped()

    def find_held(self, tokens: Sequence[int], salt: str) -> HeldKV | None:
        return self._held.store.find(tokens[:-1], salt)

    @property
    def held_bytes(self) -> int:
        return self._held.store.nbytes

    def give_up_held(self, nbytes: int) -> None:
        self._held.store.give_up(nbytes)

    def forget_held(self, tokens: Sequence[int], salt: str) -> None:
        self._held.store.forget(tokens, salt)

    def logits(
        self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None, *, chunk_tokens: int | None = None
    ) -> Any:
        """Raises ModelError: there are none."""
        raise simulated_model.no_logits()

    def close(self) -> None:
        """Stop the thread; running requests get Cancelled. Safe to call twice."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    # Everything below runs on the thread. `busy_until`: when the simulated machine has finished all its work so far.

    def _run(self) -> None:
        try:
            self._serve()
        finally:  # also after an exception of a listener
            with self._wake:
                self._closed = True
            self._fail_all()

    def _serve(self) -> None:
        busy_until = 0.0
        while jobs := self._next_batch():
            busy_until = max(busy_until, jobs[0].timing.submitted)
            for job in jobs:
                busy_until = self._prepare(job, busy_until)
                self.on_beat()
            if decoding := [job for job in jobs if not job.chunks]:
                busy_until += self._step_s(decoding)
                self._work_until(busy_until)
                for job in decoding:
                    self._deliver(job)
                self._after_step()
                self.on_beat()

    def _next_batch(self) -> list[_Job]:
        """The requests of the batch; none once the engine is closed. Waits until there are some."""
        with self._wake:
            while not self._jobs and not self._closed:
                self._wake.wait()
            return [] if self._closed else list(self._jobs.values())[: self._model.options.max_batch]

    def _prepare(self, job: _Job, busy_until: float) -> float:
        """Ingest a new request and compute one chunk of its prompt if any is left; returns the new `busy_until`."""
        if job.chunks is None:
            job.timing.started = time.monotonic()
            busy_until += ingest(job.kv.nbytes) if job.kv else 0.0
            self._work_until(busy_until)
            job.timing.ingested = time.monotonic()
            job.timing.computed_prompt_tokens = 1 if job.kv else len(job.request.tokens) - job.held
            job.chunks = [] if job.kv else self._chunks(job.held, len(job.request.tokens) - 1)
            job.kv = None
        if job.chunks:
            busy_until += job.chunks.pop(0)
            self._work_until(busy_until)
        return busy_until

    def _work_until(self, moment: float) -> None:
        """Sleep until then, with a beat as often as the pieces of a real engine's work end."""
        while moment - time.monotonic() > PIECE_S:
            time.sleep(PIECE_S)
            self.on_beat()
        sleep_until(moment)

    def _chunks(self, held: int, tokens: int) -> list[float]:
        """Seconds of each chunk of a prompt of which the first tokens are held."""
        before, ends = self._model.prefill(held).seconds, self._model.prefill(tokens).chunk_ends
        spans = (end - max(begin, before) for begin, end in zip((0.0, *ends), ends, strict=False))
        return [span for span in spans if span > 0]

    def _hold(self, job: _Job) -> None:
        """Keep the KV of a request that was ended in its answer, for one that begins with the same tokens."""
        if job.written:
            with self._holding:
                self._held.hold(job.request.tokens, job.written, job.request.salt)

    def _step_s(self, jobs: Sequence[_Job]) -> float:
        context = sum(job.context for job in jobs) // len(jobs)
        return step(self._model.device, self._model.shape, context, self._model.options.dtype, len(jobs))

    def _deliver(self, job: _Job) -> None:
        """Pass the request's next token to its listener. Before the last one the request leaves the engine."""
        try:
            token, now = next(job.answer), time.monotonic()
        except DisaggError as error:  # the answer cannot keep its form
            self._leave(job)
            job.fail(error)
            return
        job.written.append(token.id)
        job.timing.first_token = job.timing.first_token or now
        if token.finish:
            self._hold(job)
            self._leave(job)
        with job.lock:
            if job.open:
                job.listener.on_tokens((token,), job.timing)

    def _leave(self, job: _Job) -> None:
        with self._wake:
            if self._jobs.get(job.request.id) is job:
                del self._jobs[job.request.id]

    def _fail_all(self) -> None:
        with self._wake:
            jobs = list(self._jobs.values())
            self._jobs.clear()
        self._held.store.clear()
        for job in jobs:
            job.fail(Cancelled("the simulated decode engine was closed", "send the request again"))
