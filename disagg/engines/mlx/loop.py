"""The engine's thread: runs commands, steps the batch, calls listeners with tokens.

Invariants
- A listener is called with its job's lock held, and only while the job is open; `cancel` closes the job under that
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from disagg.config import EngineOptions
from disagg.engines.base import Token
from disagg.engines.base.priority import lower_priority_of_thread
from disagg.engines.mlx.batching.groups import GroupedBatch
from disagg.engines.mlx.batching.job import Job, Jobs
from disagg.engines.mlx.batching.memory import bound_memory, release_memory, trim_memory
from disagg.engines.mlx.commands import Commands, as_disagg
from disagg.engines.mlx.held import Rows, hold, make_store
from disagg.engines.mlx.load import select_device
from disagg.engines.mlx.patches import Patch
from disagg.engines.mlx.prepare import Prepared, prepare
from disagg.engines.model.held import LayerSnapshot, PrefixCache
from disagg.errors import Cancelled, DisaggError, KVRefuted, ModelError

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Steps between two updates of the batch's KV bytes while no request joins or leaves: an update takes about 25 us with
# 48 layers, and caches grow every 256 tokens.
_COUNT_STEPS = 64

# Without work, before memory is trimmed: a request that follows at once would pay for the page faults, about 5 ms.
_TRIM_AFTER_S = 1.0


class Loop:
    """The engine's thread and its queue of commands. Public methods may be called from any thread."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self.after_step: Callable[[], None] = lambda: None  # called after each step, with no lock held
        self.on_beat: Callable[[], None] = lambda: None  # called after each command and step, with no lock held
        self._commands = Commands()
        self._lock = self._commands.changed  # of everything below that other threads read
        self._jobs = Jobs()
        self.held: PrefixCache[Rows, LayerSnapshot]  # set once the model is loaded
        self._batch_bytes = 0
        self._steps = 0
        self._serving = False
        self._closed = False
        self._stopped = False  # the thread runs no more commands
        self._broken: str | None = None  # the error that ended the thread; None if close() did
        self._thread: threading.Thread | None = None

    def start(self, source: str | Path, *, context: int, patches: Sequence[Patch]) -> Prepared:
        """Start the thread, load the model on it, and return once it serves. Raises what loading raises."""
        ready: Future[Prepared] = Future()
        arguments = (source, context, patches, ready)
        self._thread = threading.Thread(target=self._main, args=arguments, name="mlx-decode", daemon=True)
        self._thread.start()
        return ready.result()

    @property
    def alive(self) -> bool:
        with self._lock:
            return self._serving and not self._closed

    @property
    def kv_bytes(self) -> int:
        with self._lock:
            return self._batch_bytes

    @property
    def running(self) -> int:
        with self._lock:
            return len(self._jobs)

    def submit(self, job: Job) -> None:
        with self._lock:
            self._require_open()
            self._jobs.add(job)
            self._commands.post(lambda: self._insert(job), lambda error: self._fail(job, error))

    def cancel(self, request_id: str, dropped: Callable[[], None]) -> None:
        with self._lock:
            job = self._jobs.get(request_id)
        if job is not None:
            with job.lock:  # waits for a call to the listener that has already begun
                job.open = False
            with self._lock:
                self._jobs.drop(job)
                if not self._stopped:
                    self._commands.post(lambda: self._drop(job, dropped), lambda error: dropped())
                    return
        dropped()

    def call(self, function: Callable[[Any], _Result]) -> _Result:
        """Run `function(model)` on the thread, between two steps, and wait for its result."""
        future: Future[_Result] = Future()
        with self._lock:
            self._require_open()
            self._commands.post(lambda: future.set_result(function(self._prepared.model)), future.set_exception)
        return future.result()

    def give_up_held(self, nbytes: int) -> None:
        """Drop held KV. The thread frees its memory, for it owns the arrays."""
        dropped = self.held.give_up(nbytes)
        with self._lock:
            if dropped and not self._closed:
                self._commands.post(dropped.clear, lambda error: None)

    def forget_held(self, tokens: Sequence[int], salt: str) -> None:
        """Drop what is held of a prompt. The thread frees its memory."""
        dropped = self.held.forget(tokens, salt)
        with self._lock:
            if dropped and not self._closed:
                self._commands.post(dropped.clear, lambda error: None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _require_open(self) -> None:
        if self._closed:
            raise self._ended()

    def _ended(self) -> DisaggError:
        """Why the thread has ended; a new error for each caller."""
        if self._broken is not None:
            return ModelError(f"the decode engine's thread ended: {self._broken}", "restart the decode server")
        return Cancelled("the decode engine is closed", "start the server again")

    # Everything below runs on the thread.

    def _main(self, source: str | Path, context: int, patches: Sequence[Patch], ready: Future[Prepared]) -> None:
        try:
            device = select_device(self._options.device)
            if device == mx.cpu:
                lower_priority_of_thread()  # before MLX starts the threads that compute
            self._stream = mx.new_thread_local_stream(device)
            with mx.stream(self._stream):
                bound_memory()
                prepared = prepare(source, self._options, context=context, device=device, patches=patches)
                self._prepared = prepared
                self._batch = self._new_batch()
                self.held = make_store(prepared.model, self._options.max_kv_bytes)
                release_memory()
        except Exception as error:  # noqa: BLE001 - raised again by start(), on the caller's thread
            with self._lock:
                self._closed = True
            ready.set_exception(error)
            return
        with self._lock:
            self._serving = True
        ready.set_result(prepared)
        with mx.stream(self._stream):
            try:
                self._run()
            except BaseException as error:  # noqa: BLE001 - the top of the thread: waiting callers get the error from _stop
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
            except Exception as error:  # noqa: BLE001 - else one step's error would end the engine
                self._rebuild(error)

    def _wait(self) -> int | None:
        """Wait until there is work; returns the number of queued commands, None once the engine is closed."""
        if not self._has_work(within_s=_TRIM_AFTER_S):
            trim_memory()
            self._has_work()
        with self._lock:
            return None if self._closed else len(self._commands)

    def _has_work(self, within_s: float | None = None) -> bool:
        with self._lock:
            return bool(self._lock.wait_for(lambda: self._commands or self._closed or len(self._batch), within_s))

    def _turn(self, commands: int) -> None:
        """Run this many commands and take one step."""
        for _ in range(commands):
            self._commands.run_first()
            self.on_beat()
        if commands:
            self._update_counters()
        if len(self._batch):
            self._step()
            self.on_beat()
        if not len(self._batch):
            release_memory()

    def _stop(self) -> None:
        """Fail every request and command, and drop every cache."""
        with self._lock:
            self._closed, self._serving, self._stopped = True, False, True
            commands, jobs = self._commands.take_all(), list(self._jobs.values())
            self._jobs.clear()
            self._batch_bytes = 0
        for job in jobs:
            self._fail(job, self._ended())
        for fail in commands:
            fail(self._ended())
        self._batch.close()
        self.held.clear()

    def _insert(self, job: Job) -> None:
        try:
            if job.open:
                job.timing.started = time.monotonic()
                caches = self._batch.build(job)
                job.timing.ingested = time.monotonic()
                if job.hold_prompt and caches is not None:
                    self._store(job, job.tokens[: job.covered], caches)
                self._batch.insert(job, caches)  # last, so that a failure leaves nothing of the job behind
        except KVRefuted as error:  # without the frames, which have the caches
            self._fail(job, error.with_traceback(None))
        finally:
            job.kv = job.held = None

    def _hold(self, job: Job) -> None:
        """Keep the KV of a request that was taken out of the batch, for one that begins with the same tokens."""
        ended, job.ended = job.ended, None
        if ended is not None:
            self._store(job, *ended)

    def _store(self, job: Job, tokens: list[int], caches: list[Any]) -> None:
        """Keep the KV of these tokens of a request."""
        try:
            hold(self.held, tokens, caches, job.salt, job.snapshots)
        except RuntimeError:  # mlx is out of memory: the answer is complete without it
            _log.warning("the KV of request %s could not be held", job.id, exc_info=True)

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
        if finished or self._steps % _COUNT_STEPS == 0:
            self._update_counters(finished)
        undelivered = [job for job, token in generated if not self._deliver(job, token)]
        for job in undelivered:
            self._remove(job)
        if undelivered:
            self._update_counters(undelivered)
        if generated:
            self.after_step()

    def _deliver(self, job: Job, token: Token) -> bool:
        """Pass the token on; False if the answer cannot go on."""
        if job.constraint is not None and job.constraint.error is not None:
            self._fail(job, job.constraint.error)
            return False
        return job.deliver(token)

    def _fail(self, job: Job, error: DisaggError) -> None:
        with self._lock:
            self._jobs.drop(job)
        job.fail(error)

    def _rebuild(self, error: Exception) -> None:
        """Fail every request of the batch and replace the batch by an empty one. Finished requests whose last token is
        undelivered fail, too."""
        with self._lock:
            lost = [job for job in self._jobs.values() if job.timing.ingested]
        _log.error("a decode step failed; %d requests are lost", len(lost), exc_info=error)
        self._batch.close()
        self._batch = self._new_batch()
        self._update_counters()
        for job in lost:
            self._fail(job, as_disagg(error, "a decode step failed"))

    def _update_counters(self, finished: Sequence[Job] = ()) -> None:
        """Update the counters after jobs joined or left the batch."""
        nbytes = self._batch.nbytes
        with self._lock:
            self._batch_bytes = nbytes
            for job in finished:
                self._jobs.drop(job)
