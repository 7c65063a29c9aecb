"""A decode engine whose framework is given to it: its thread runs commands, steps the batch, calls listeners with
tokens.

Other threads queue commands for that thread, which it runs between two steps. It alone uses the model and its arrays.

Invariants
- A listener is called with its job's lock taken, and only while the job is open; `cancel` closes the job under that
  lock, so no call begins afterwards.
- A job has left every counter and cache before its last token is delivered.
- An error in a command fails that command only. An error in a step fails the requests of the batch, not the engine: the
  batch is replaced by an empty one.
- When the thread ends, for any reason, every request and every waiting caller gets an error, and `alive` is False.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy
import numpy.typing

from disagg.engines.base import DecodeRequest, EngineInfo, Listener, Token
from disagg.engines.decoding.batch import Backend, Batch, Job
from disagg.engines.decoding.commands import Calls, Commands, as_disagg
from disagg.engines.decoding.valid import require_valid
from disagg.engines.model.text import PromptTokenizer
from disagg.errors import Cancelled, DisaggError, KVRefuted, ModelError, Overloaded, RequestError
from disagg.kv.received import ReceivedKV

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class DecodeBounds:
    """max_requests: in an engine at once, decoding or waiting for a place in the batch: a bound, not a target.
    beat_s: between two signs of life while all requests wait for their KV. count_steps: between two updates of the
    batch's KV bytes while no request joins or leaves: an update takes about 25 us with 48 layers, and caches grow
    every 256 tokens. trim_after_s: without work, before memory is trimmed: a request that follows at once would pay
    for the page faults, about 5 ms."""

    max_requests: int = 1024
    beat_s: float = 0.5
    count_steps: int = 64
    trim_after_s: float = 1.0


def _ignore() -> None:
    pass


class DecodeEngine(Calls):
    """Turns KV into tokens with continuous batching, on a thread of its own. Public methods may be called from any.

    opened: loads the model, on the engine's thread, and keeps what else that thread needs until it ends. The
    constructor returns once the engine serves, and raises what loading raises.
    """

    bounds = DecodeBounds()

    def __init__(self, opened: Callable[[], AbstractContextManager[Backend]], *, name: str) -> None:
        self.on_beat: Callable[[], None] = _ignore
        """Called on the engine's thread after each piece of work: a step, a chunk of a prompt, a command. It must not
        block."""
        self._after_step: Callable[[], None] = _ignore
        self._commands = Commands()
        self._lock = self._commands.changed  # of everything below that other threads read
        self._jobs: dict[str, Job] = {}
        self._batch_bytes = 0
        self._steps = 0
        self._serving = False
        self._closed = False
        self._stopped = False  # the thread runs no more commands
        self._broken: str | None = None  # the error that ended the thread; None if close() did
        self._backend: Backend  # both set on the thread, before it serves
        self._batch: Batch
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(opened, ready), name=name, daemon=True)
        self._thread.start()
        ready.result()
        self._info: EngineInfo = self._backend.info

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def tokenizer(self) -> PromptTokenizer:
        return self._backend.tokenizer

    @abstractmethod
    def warm_up(self) -> None:
        """Run small requests, so that the framework's one-time work does not delay the first request."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """Memory to receive KV into; see kv.arena.Allocate."""

    @abstractmethod
    def logits(
        self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None, *, chunk_tokens: int | None = None
    ) -> numpy.typing.NDArray[numpy.float32]:
        """Logits [last, vocab] as of PrefillEngine.logits; with `kv`, which covers tokens[:-last], only the last tokens
        are computed."""

    @property
    def alive(self) -> bool:
        """False once the engine's thread has ended, for any reason; no further request is served."""
        with self._lock:
            return self._serving and not self._closed

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV in the engine's own caches, with their padding; 0 if nothing runs. Received KV, also of requests
        that wait to be ingested, is not included: the receiver counts it until it is released."""
        with self._lock:
            return self._batch_bytes

    @property
    def running(self) -> int:
        """Requests in the engine, queued or decoding."""
        with self._lock:
            return len(self._jobs)

    def submit(self, request: DecodeRequest, listener: Listener) -> None:
        """Queue a request; its tokens go to the listener.

        After the first token the engine reads neither `request.kv` and `request.arriving`, so that their memory may be
        reused, nor `request.held`, so that it may be released. The KV of a request that ends is held before its last
        token is delivered.

        RequestError for invalid sampling values or an id in use, LayoutMismatch if the KV is not
        this model's or not of the tokens that it must cover, Overloaded if the engine is full, Cancelled after close,
        ModelError if the engine's thread has ended."""
        require_valid(request, self._info)
        bare = replace(request, kv=None, arriving=None, held=None)
        job = Job(bare, listener, request.kv, request.arriving, request.held)
        job.timing.submitted = time.monotonic()
        with self._lock:
            self._require_open()
            if request.id in self._jobs:
                raise RequestError(f"request {request.id} is already running", "give every request an id of its own")
            if len(self._jobs) >= self.bounds.max_requests:
                text = f"{self.bounds.max_requests} requests are already in the decode engine"
                raise Overloaded(text, "try again later")
            self._jobs[request.id] = job
            self._commands.post(lambda: self._insert(job), lambda error: self._fail(job, error))

    def after_step(self, call: Callable[[], None]) -> None:
        """Set the function to call on the engine's thread after each step, after all listeners. It must not block and
        replaces the one set before. If it raises, the requests of the batch fail."""
        self._after_step = call

    def cancel(self, request_id: str, dropped: Callable[[], None] = _ignore) -> None:
        """Drop a request at any stage; no call to its listener begins after this returns. `dropped` is called, on any
        thread, as soon as the engine has nothing of it in memory but what it holds for later requests: at once if the
        request has ended, or its id is unknown. It must not block."""
        with self._lock:
            job = self._jobs.get(request_id)
        if job is not None:
            with job.lock:  # waits for a call to the listener that has already begun
                job.open = False
            with self._lock:
                self._forget(job)
                if not self._stopped:
                    self._commands.post(lambda: self._drop(job, dropped), lambda error: dropped())
                    return
        dropped()

    def close(self) -> None:
        """Stop the thread; running requests get Cancelled. May be called twice."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _forget(self, job: Job) -> None:
        """Nothing happens if it is not there any more, or its id is another request's."""
        if self._jobs.get(job.request.id) is job:
            del self._jobs[job.request.id]

    def _require_open(self) -> None:
        if self._closed:
            raise self._why_ended()

    def _why_ended(self) -> DisaggError:
        """Why the thread has ended; a new error for each caller."""
        if self._broken is not None:
            return ModelError(f"the decode engine's thread ended: {self._broken}", "restart the decode server")
        return Cancelled("the decode engine is closed", "start the server again")

    # Everything below runs on the thread.

    def _main(self, opened: Callable[[], AbstractContextManager[Backend]], ready: Future[None]) -> None:
        with ExitStack() as stack:
            try:
                self._backend = stack.enter_context(opened())
                self._batch = self._backend.new_batch()
                self._backend.release_memory()
            except Exception as error:  # noqa: BLE001 - raised again by the constructor, on its caller's thread
                self._closed = True
                ready.set_exception(error)
                return
            self._serving = True
            ready.set_result(None)
            try:
                self._run()
            except BaseException as error:  # noqa: BLE001 - the top of the thread: waiting callers get it from _stop
                _log.critical("the decode engine's thread ended", exc_info=error)
                self._broken = f"{type(error).__name__}: {error}"
            finally:
                self._stop()

    def _run(self) -> None:
        while (waiting := self._wait()) is not None:
            try:
                self._turn(waiting)
            except Exception as error:  # noqa: BLE001 - else one step's error would end the engine
                self._rebuild(error)

    def _wait(self) -> int | None:
        """Wait until there is work; returns the number of queued commands, None once the engine is closed. Beats while
        requests wait for their KV: they are not held up here."""
        limit: float | None = self.bounds.trim_after_s
        while True:
            waiting = len(self._batch) > 0
            with self._lock:
                if self._lock.wait_for(self._has_work, self.bounds.beat_s if waiting else limit):
                    return None if self._closed else len(self._commands)
            if waiting:
                self.on_beat()
            else:
                self._backend.trim_memory()
                limit = None

    def _has_work(self) -> bool:
        return bool(self._closed or self._commands or self._batch.due)

    def _arrived(self, job: Job) -> None:
        """Called on any thread."""
        job.news = True
        with self._lock:
            self._lock.notify()

    def _turn(self, commands: int) -> None:
        """Run this many commands and take one step."""
        for _ in range(commands):
            self._commands.run_first()
            self.on_beat()
        if commands:
            self._update_counters()
        if (job := self._batch.compute_tail()) is not None:
            self._ingest_arrived(job)
        if len(self._batch):
            self._step()
            self.on_beat()
        if not len(self._batch):
            self._backend.release_memory()

    def _stop(self) -> None:
        """Fail every request and command, and drop every cache."""
        with self._lock:
            self._closed, self._serving, self._stopped = True, False, True
            commands, jobs = self._commands.take_all(), list(self._jobs.values())
            self._jobs.clear()
            self._batch_bytes = 0
        for job in jobs:
            self._fail(job, self._why_ended())
        for fail in commands:
            fail(self._why_ended())
        self._batch.close()
        self._backend.held.clear()

    def _insert(self, job: Job) -> None:
        if not job.open:
            job.kv = job.arriving = job.held = None
            return
        job.timing.started = time.monotonic()
        if job.arriving is None:
            self._ingest(job)
            return
        self._batch.receive(job)
        job.arriving.watch(lambda: self._arrived(job))
        self._arrived(job)

    def _ingest_arrived(self, job: Job) -> None:
        """Nothing more of the job's KV arrives."""
        error = job.error
        try:
            if error is None:
                self._ingest(job)
        except Exception as failure:  # noqa: BLE001 - as of a command: this request's error
            error = as_disagg(failure, "the decode engine failed to build the caches of a request")
        if error is not None:
            job.arriving = job.held = job.tail = None
            self._fail(job, error.with_traceback(None))
        self._update_counters()

    def _ingest(self, job: Job) -> None:
        try:
            caches = self._batch.build(job)
            job.timing.ingested = time.monotonic()
            if job.request.hold_prompt and caches is not None:
                self._store(job, list(job.request.tokens[: job.covered]), caches)
            self._batch.insert(job, caches)  # last, so that a failure leaves nothing of the job behind
        except KVRefuted as error:  # without the frames, which have the caches
            self._fail(job, error.with_traceback(None))
        finally:
            job.kv = job.arriving = job.held = job.tail = None

    def _hold(self, job: Job) -> None:
        """Keep the KV of a request that was taken out of the batch, for one that begins with the same tokens."""
        ended, job.ended = job.ended, None
        if ended is not None:
            self._store(job, *ended)

    def _store(self, job: Job, tokens: list[int], caches: Any) -> None:
        """Keep the KV of these tokens of a request."""
        try:
            self._backend.hold(job, tokens, caches)
        except RuntimeError:  # mlx's error if it is out of memory: the answer is complete without it
            _log.warning("the KV of request %s could not be held", job.request.id, exc_info=True)

    def _drop(self, job: Job, dropped: Callable[[], None]) -> None:
        self._remove(job)
        dropped()

    def _remove(self, job: Job) -> None:
        try:
            self._batch.remove(job)
            self._hold(job)
        except Exception as error:  # noqa: BLE001 - a batch that is partly changed would compute wrong answers
            self._rebuild(error)

    def _step(self) -> None:
        generated = self._batch.step()
        finished = [job for job, token in generated if token.finish]
        self._batch.drop_finished(finished)
        for job in finished:
            self._hold(job)
        self._steps += 1
        if finished or self._steps % self.bounds.count_steps == 0:
            self._update_counters(finished)
        undelivered = [job for job, token in generated if not self._deliver(job, token)]
        for job in undelivered:
            self._remove(job)
        if undelivered:
            self._update_counters(undelivered)
        if generated:
            self._after_step()

    def _deliver(self, job: Job, token: Token) -> bool:
        """Pass the token on; False if the answer cannot go on."""
        if job.error is not None:
            self._fail(job, job.error)
            return False
        return job.deliver(token)

    def _fail(self, job: Job, error: DisaggError) -> None:
        with self._lock:
            self._forget(job)
        job.fail(error)

    def _rebuild(self, error: Exception) -> None:
        """Fail every request of the batch and replace the batch by an empty one. Finished requests whose last token is
        undelivered fail, too."""
        with self._lock:
            lost = [job for job in self._jobs.values() if job.timing.ingested or job.tail is not None]
        _log.error("a decode step failed; %d requests are lost", len(lost), exc_info=error)
        self._batch.close()
        self._batch = self._backend.new_batch()
        self._update_counters()
        for job in lost:
            self._fail(job, as_disagg(error, "a decode step failed"))

    def _update_counters(self, finished: Sequence[Job] = ()) -> None:
        """Update the counters after jobs joined or left the batch."""
        nbytes = self._batch.nbytes
        with self._lock:
            self._batch_bytes = nbytes
            for job in finished:
                self._forget(job)
