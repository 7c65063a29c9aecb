"""The engine's thread: carries out commands, steps the batch, hands tokens to listeners.

Rules it keeps
- A listener is called with its job's lock held, and only while the job is open; `cancel` closes the job under that
  lock, so no call begins afterwards.
- A job whose last token is handed out has already left every counter and cache.
- A failing command fails by itself. A failing step fails the requests of the batch, not the engine: the generator is
  built anew.
- However the thread ends, every request and every caller that waits for it hears of it; afterwards `alive` is False.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from disagg.config import EngineOptions
from disagg.engines.base import Token
from disagg.engines.mlx.batch import Job, bound_memory, release_memory
from disagg.engines.mlx.groups import GroupedBatch
from disagg.engines.mlx.load import select_device
from disagg.engines.mlx.patches import Patch
from disagg.engines.mlx.prepare import Prepared, prepare
from disagg.errors import Cancelled, DisaggError, ModelError, Overloaded, RequestError

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Requests in the engine at once, decoding or waiting for a place in the batch: a bound, not a target.
MAX_REQUESTS = 1024
# Steps between two readings of the batch's KV bytes while nobody joins or leaves: a reading costs about 25 us at 48
# layers, and caches grow once in 256 tokens.
_READING_STEPS = 64


@dataclass(frozen=True, slots=True)
class _Command:
    """Something for the thread to do; `fail` tells whoever asked for it that it could not be done."""

    run: Callable[[], object]
    fail: Callable[[DisaggError], object]


class Loop:
    """Commands from any thread, work on one."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self.after_step: Callable[[], None] = lambda: None  # called after each step, with no lock held
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()  # bounded: at most two per job, and one per waiting caller
        self._jobs: dict[str, Job] = {}
        self._batch_bytes = 0
        self._steps = 0
        self._serving = False
        self._closed = False
        self._broken: str | None = None  # what ended the thread, where close() did not
        self._thread: threading.Thread | None = None

    def start(self, source: str | Path, *, context: int, patches: Sequence[Patch]) -> Prepared:
        """Start the thread, load the model on it, and return once it serves; raises what loading raises."""
        ready: Future[Prepared] = Future()
        arguments = (source, context, patches, ready)
        self._thread = threading.Thread(target=self._main, args=arguments, name="mlx-decode", daemon=True)
        self._thread.start()
        return ready.result()

    @property
    def alive(self) -> bool:
        with self._wake:
            return self._serving and not self._closed

    @property
    def kv_bytes(self) -> int:
        with self._wake:
            return self._batch_bytes

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
            self._post(lambda: self._insert(job), lambda error: self._fail(job, error))

    def cancel(self, request_id: str) -> None:
        with self._wake:
            job = self._jobs.get(request_id)
        if job is None:
            return
        with job.lock:  # waits for a call to the listener that has already begun
            job.open = False
        with self._wake:
            self._forget(job)
            self._post(lambda: self._remove(job), lambda error: None)  # its caller asked for nothing but silence

    def call(self, function: Callable[[Any], _Result]) -> _Result:
        """Run `function(model)` on the thread, between two steps, and wait for its result."""
        future: Future[_Result] = Future()
        with self._wake:
            self._require_open()
            self._post(lambda: future.set_result(function(self._prepared.model)), future.set_exception)
        return future.result()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _require_open(self) -> None:
        if self._closed:
            raise self._ended()

    def _ended(self) -> DisaggError:
        """Why nothing is done any more: an error of its own for each who asks."""
        if self._broken is not None:
            return ModelError(f"the decode engine's thread ended: {self._broken}", "restart the decode server")
        return Cancelled("the decode engine is closed", "start the server again")

    def _post(self, run: Callable[[], object], fail: Callable[[DisaggError], object]) -> None:
        self._commands.append(_Command(run, fail))
        self._wake.notify()

    def _forget(self, job: Job) -> None:
        if self._jobs.get(job.id) is job:
            del self._jobs[job.id]

    # Everything below runs on the thread.

    def _main(self, source: str | Path, context: int, patches: Sequence[Patch], ready: Future[Prepared]) -> None:
        try:
            device = select_device(self._options.device)
            self._stream = mx.new_thread_local_stream(device)
            with mx.stream(self._stream):
                bound_memory()
                prepared = prepare(source, self._options, context=context, device=device, patches=patches)
                self._prepared = prepared
                self._batch = self._new_batch()
                release_memory()
        except Exception as error:  # noqa: BLE001 - raised again by start(), on the caller's thread
            with self._wake:
                self._closed = True
            ready.set_exception(error)
            return
        with self._wake:
            self._serving = True
        ready.set_result(prepared)
        with mx.stream(self._stream):
            try:
                self._run()
            except BaseException as error:  # noqa: BLE001 - above is only the interpreter; whoever waits must hear of it
                _log.critical("the decode engine's thread ended", exc_info=error)
                self._broken = f"{type(error).__name__}: {error}"
            finally:
                self._stop()

    def _new_batch(self) -> GroupedBatch:
        return GroupedBatch(
            self._prepared,
            stream=self._stream,
            max_batch=self._options.max_batch,
            chunk_tokens=self._options.chunk_tokens,
        )

    def _run(self) -> None:
        while (waiting := self._wait()) is not None:
            try:
                self._turn(waiting)
            except Exception as error:  # noqa: BLE001 - else the engine would take every later request along
                self._rebuild(error)

    def _wait(self) -> int | None:
        """Sleep until there is something to do; how many commands wait, None once the engine is closed."""
        with self._wake:
            while not self._commands and not self._closed and not len(self._batch):
                self._wake.wait()
            return None if self._closed else len(self._commands)

    def _turn(self, commands: int) -> None:
        """Carry out this many commands and take one step."""
        for _ in range(commands):
            self._carry_out()
        if commands:
            self._settle()
        if len(self._batch):
            self._step()
        if not len(self._batch):
            release_memory()

    def _carry_out(self) -> None:
        """The first command. In a frame of its own: a sleeping loop must not keep it, and a whole KV with it, alive."""
        with self._wake:
            command = self._commands.popleft()
        try:
            command.run()
        except Exception as error:  # noqa: BLE001 - whatever mlx raises for one command is that command's error
            command.fail(_as_disagg(error, "the decode engine could not do as asked"))
        except BaseException:  # the thread ends: the rest of the commands hear of it from _stop
            with self._wake:
                self._commands.appendleft(command)
            raise

    def _stop(self) -> None:
        """Tell everybody who waits, and let go of every cache."""
        with self._wake:
            self._closed, self._serving = True, False
            commands, jobs = list(self._commands), list(self._jobs.values())
            self._commands.clear()
            self._jobs.clear()
            self._batch_bytes = 0
        for job in jobs:
            self._fail(job, self._ended())
        for command in commands:
            command.fail(self._ended())
        self._batch.close()

    def _insert(self, job: Job) -> None:
        try:
            if job.open:
                job.timing.started = time.monotonic()
                caches = self._batch.build(job)
                job.timing.ingested = time.monotonic()
                self._batch.insert(job, caches)  # the job is in by its last act: a failure leaves nothing of it behind
        finally:
            job.kv = None

    def _remove(self, job: Job) -> None:
        try:
            self._batch.remove(job)
        except Exception as error:  # noqa: BLE001 - a batch that was taken apart halfway would answer wrongly
            self._rebuild(error)

    def _step(self) -> None:
        handed_out = self._batch.step()
        finished = [job for job, token in handed_out if token.finish]
        self._batch.forget(finished)
        self._steps += 1
        if finished or self._steps % _READING_STEPS == 0:
            self._settle(finished)
        unheard = [job for job, token in handed_out if not self._deliver(job, token)]
        for job in unheard:
            self._remove(job)
        if unheard:
            self._settle(unheard)
        if handed_out:
            self.after_step()

    def _deliver(self, job: Job, token: Token) -> bool:
        """Hand out the token; False where its listener broke."""
        job.timing.first_token = job.timing.first_token or time.monotonic()
        with job.lock:
            if not job.open:
                return True
            job.open = token.finish is None
            try:
                job.listener.on_tokens((token,), job.timing)
            except Exception:  # noqa: BLE001 - a broken listener ends its own request only
                _log.exception("the listener of request %s failed; the request is dropped", job.id)
                job.open = False
                return False
        return True

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
        """Fail every request of the batch, finished but unheard ones included, and start with an empty one."""
        with self._wake:
            lost = [job for job in self._jobs.values() if job.timing.ingested]
        _log.error("a decode step failed; %d requests are lost", len(lost), exc_info=error)
        self._batch.close()
        self._batch = self._new_batch()
        self._settle()
        for job in lost:
            self._fail(job, _as_disagg(error, "a decode step failed"))

    def _settle(self, gone: Sequence[Job] = ()) -> None:
        """Bring the counters up to date after jobs came or went."""
        nbytes = self._batch.nbytes
        with self._wake:
            self._batch_bytes = nbytes
            for job in gone:
                self._forget(job)


def _as_disagg(error: Exception, what: str) -> DisaggError:
    if isinstance(error, DisaggError):
        return error
    return ModelError(f"{what}: {type(error).__name__}: {error}", "send it again; the engine goes on")
