"""The engine's thread: carries out commands, steps the batch, hands tokens to listeners.

Rules it keeps
- A listener is called with its job's lock held, and only while the job is open; `cancel` closes the job under that
  lock, so no call begins afterwards.
- A job whose last token is handed out has already left every counter and cache.
- A failing step fails the requests of the batch, not the engine: the generator is built anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from disagg.config import EngineOptions
from disagg.engines.base import Token
from disagg.engines.mlx_batch import Batch, Job, release_memory
from disagg.engines.mlx_load import select_device
from disagg.engines.mlx_mends import Mend
from disagg.engines.mlx_prepare import Prepared, prepare
from disagg.errors import Cancelled, DisaggError, ModelError, Overloaded, RequestError

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Requests in the engine at once, decoding or waiting for a place in the batch: a bound, not a target.
MAX_REQUESTS = 1024
# Steps between two readings of the batch's KV bytes while nobody joins or leaves: a reading costs about 25 us at 48
# layers, and caches grow once in 256 tokens.
_READING_STEPS = 64


class Loop:
    """Commands from any thread, work on one."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()  # bounded: at most two per job, and one per waiting caller
        self._jobs: dict[str, Job] = {}
        self._waiting_bytes = 0  # received, not yet built into caches
        self._batch_bytes = 0
        self._steps = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, source: str | Path, *, context: int, mends: Sequence[Mend]) -> Prepared:
        """Start the thread, load the model on it, and return once it serves; raises what loading raises."""
        ready: Future[Prepared] = Future()
        arguments = (source, context, mends, ready)
        self._thread = threading.Thread(target=self._main, args=arguments, name="mlx-decode", daemon=True)
        self._thread.start()
        return ready.result()

    @property
    def kv_bytes(self) -> int:
        with self._wake:
            return self._waiting_bytes + self._batch_bytes

    @property
    def running(self) -> int:
        with self._wake:
            return len(self._jobs)

    def submit(self, job: Job) -> None:
        with self._wake:
            self._require_open()
            if job.id in self._jobs:
                raise RequestError(f"request {job.id} is already running", "give every request an id of its own")
            if len(self._jobs) >= MAX_REQUESTS:
                raise Overloaded(f"{MAX_REQUESTS} requests are already in the decode engine", "try again later")
            self._jobs[job.id] = job
            self._waiting_bytes += _nbytes(job)
            self._post(lambda: self._insert(job))

    def cancel(self, request_id: str) -> None:
        with self._wake:
            job = self._jobs.get(request_id)
        if job is None:
            return
        with job.lock:  # waits for a call to the listener that has already begun
            job.open = False
        with self._wake:
            self._forget(job)
            self._post(lambda: self._remove(job))

    def call(self, function: Callable[[Any], _Result]) -> _Result:
        """Run `function(model)` on the thread, between two steps, and wait for its result."""
        future: Future[_Result] = Future()
        with self._wake:
            self._require_open()
            self._post(lambda: self._answer(future, function))
        return future.result()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _require_open(self) -> None:
        if self._closed:
            raise Cancelled("the decode engine is closed", "start the server again")

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.notify()

    def _forget(self, job: Job) -> None:
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]

    # Everything below runs on the thread.

    def _main(self, source: str | Path, context: int, mends: Sequence[Mend], ready: Future[Prepared]) -> None:
        try:
            device = select_device(self._options.device)
            self._stream = mx.new_thread_local_stream(device)
            with mx.stream(self._stream):
                prepared = prepare(source, self._options, context=context, device=device, mends=mends)
                self._prepared = prepared
                self._batch = self._new_batch()
                release_memory()
        except Exception as error:  # noqa: BLE001 - raised again by start(), on the caller's thread
            with self._wake:
                self._closed = True
            ready.set_exception(error)
            return
        ready.set_result(prepared)
        with mx.stream(self._stream):
            try:
                self._run()
            finally:  # whatever ends the thread, nobody is left waiting
                self._stop()

    def _new_batch(self) -> Batch:
        return Batch(
            self._prepared.model,
            stream=self._stream,
            eos_ids=self._prepared.info.eos_ids,
            max_batch=self._options.max_batch,
            chunk_tokens=self._options.chunk_tokens,
        )

    def _run(self) -> None:
        while not self._closed:
            self._carry_out(self._take())
            if len(self._batch):
                self._step()
            if not len(self._batch):
                release_memory()

    def _take(self) -> list[Callable[[], None]]:
        """The commands that wait; sleeps until there is something to do."""
        with self._wake:
            while not self._commands and not self._closed and not len(self._batch):
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
        return commands

    @staticmethod
    def _carry_out(commands: Sequence[Callable[[], None]]) -> None:
        """In a frame of its own: a sleeping loop must not keep the last command, and with it a whole KV, alive."""
        for command in commands:
            command()

    def _stop(self) -> None:
        with self._wake:
            self._closed = True
            commands, jobs = list(self._commands), list(self._jobs.values())
            self._commands.clear()
            self._jobs.clear()
        for job in jobs:
            self._fail(job, Cancelled("the decode engine was closed", "send the request again"))
        self._carry_out(commands)  # jobs are closed by now, and calls answer that the engine is
        self._batch.close()
        self._batch = self._new_batch()
        self._settle()

    def _answer(self, future: Future[_Result], function: Callable[[Any], _Result]) -> None:
        try:
            self._require_open()
            future.set_result(function(self._prepared.model))
        except Exception as error:  # noqa: BLE001 - raised again by call(), on the caller's thread
            future.set_exception(error)

    def _insert(self, job: Job) -> None:
        held = _nbytes(job)
        try:
            if job.open:
                caches = self._batch.build(job)
                job.timing.ingested = time.monotonic()
                self._batch.insert(job, caches)
        except Exception as error:  # noqa: BLE001 - whatever mlx raises for this request is this request's error
            self._batch.remove(job)
            self._fail(job, _as_disagg(error, "the decode engine could not take the request"))
        finally:
            job.kv = None
            self._settle(released=held)

    def _remove(self, job: Job) -> None:
        self._batch.remove(job)
        self._settle()

    def _step(self) -> None:
        try:
            handed_out = self._batch.step()
        except Exception as error:  # noqa: BLE001 - an engine that dies of one step would take every later request along
            self._rebuild(error)
            return
        finished = [job for job, token in handed_out if token.finish]
        self._batch.forget(finished)
        self._steps += 1
        if finished or self._steps % _READING_STEPS == 0:
            self._settle(finished)
        for job, token in handed_out:
            self._deliver(job, token)

    def _deliver(self, job: Job, token: Token) -> None:
        now = time.monotonic()
        job.timing.first_token = job.timing.first_token or now
        if token.finish:
            job.timing.finished = now
        with job.lock:
            if not job.open:
                return
            job.open = token.finish is None
            try:
                job.listener.on_tokens((token,), job.timing)
            except Exception:  # noqa: BLE001 - a broken listener ends its own request only
                _log.exception("the listener of request %s failed; the request is dropped", job.id)
                job.open = False
        if not job.open and not token.finish:
            self._drop(job)

    def _drop(self, job: Job) -> None:
        with self._wake:
            self._forget(job)
        self._remove(job)

    def _fail(self, job: Job, error: DisaggError) -> None:
        with self._wake:
            self._forget(job)
        with job.lock:
            if not job.open:
                return
            job.open = False
            try:
                job.listener.on_error(error)
            except Exception:  # noqa: BLE001 - as in _deliver
                _log.exception("the listener of request %s failed", job.id)

    def _rebuild(self, error: Exception) -> None:
        """Fail every request of the batch and start with an empty one."""
        _log.error("a decode step failed; %d requests are lost", len(self._batch), exc_info=error)
        jobs = self._batch.jobs
        self._batch.close()
        self._batch = self._new_batch()
        self._settle()
        for job in jobs:
            self._fail(job, _as_disagg(error, "a decode step failed"))

    def _settle(self, gone: Sequence[Job] = (), *, released: int = 0) -> None:
        """Bring the counters up to date after jobs came or went. `released`: received bytes no longer waiting."""
        nbytes = self._batch.nbytes
        with self._wake:
            self._batch_bytes = nbytes
            self._waiting_bytes -= released
            for job in gone:
                self._forget(job)


def _nbytes(job: Job) -> int:
    return 0 if job.kv is None else job.kv.nbytes


def _as_disagg(error: Exception, what: str) -> DisaggError:
    if isinstance(error, DisaggError):
        return error
    return ModelError(f"{what}: {type(error).__name__}: {error}", "send it again; the engine goes on")
