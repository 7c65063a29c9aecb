"""DecodeEngine on mlx-lm: continuous batching over handed-over or self-computed KV.

One thread owns the model, the generator, its stream and every array. Other threads leave commands for it, which it
carries out between two steps; while nothing is left to do it sleeps.
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
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from disagg.config import EngineOptions
from disagg.engines import mlx_cache, mlx_sampling
from disagg.engines.base import DecodeRequest, DecodeTiming, EngineInfo, Listener, Sampling, Token
from disagg.engines.mlx_batch import Batch, Job, release_memory
from disagg.engines.mlx_load import select_device
from disagg.engines.mlx_mends import MENDS, Mend
from disagg.engines.mlx_prepare import Prepared, prepare
from disagg.engines.text import PromptTokenizer
from disagg.errors import Cancelled, DeadlineExceeded, DisaggError, LayoutMismatch, ModelError, Overloaded, RequestError
from disagg.kv.receive import ReceivedKV

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

# Requests in the engine at once, decoding or waiting for a place in the batch: a bound, not a target.
MAX_REQUESTS = 1024
# Steps between two readings of the batch's KV bytes while nobody joins or leaves (a reading costs about 25 us at 48
# layers); caches grow every 256 tokens at most.
_KV_READING_STEPS = 64
_WARM_UP_DEADLINE_S = 600.0


class MLXDecodeEngine:
    """See base.DecodeEngine. `source`: a checkpoint folder. Loading takes as long as the constructor.

    Raises ModelError where the model cannot be loaded, PreflightRefused where mlx-lm computes it differently from the
    checkpoint's reference and no mend is known. `mends`: what may be mended.
    """

    def __init__(self, source: str | Path, options: EngineOptions, *, mends: Sequence[Mend] = MENDS) -> None:
        _require_one_thread(options)
        self._options = options
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._commands: deque[Callable[[], None]] = deque()
        self._jobs: dict[str, Job] = {}
        self._waiting_bytes = 0  # received, not yet built into caches
        self._batch_bytes = 0
        self._steps = 0
        self._closed = False
        ready: Future[Prepared] = Future()
        self._thread = threading.Thread(target=self._main, args=(Path(source), mends, ready), name="mlx", daemon=True)
        self._thread.start()
        prepared = ready.result()
        self._info, self._tokenizer = prepared.info, prepared.tokenizer

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def tokenizer(self) -> PromptTokenizer:
        return self._tokenizer

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV: received and waiting, plus the batch's caches. Exactly 0 when no request is in the engine."""
        with self._lock:
            return self._waiting_bytes + self._batch_bytes

    @property
    def running(self) -> int:
        with self._lock:
            return len(self._jobs)

    def submit(self, request: DecodeRequest, listener: Listener) -> None:
        """Queue a request. RequestError for bad sampling values or an id already here, LayoutMismatch where the KV is
        not this model's or not of tokens[:-1], Overloaded when too many wait, Cancelled after close."""
        job = self._job(request, listener)
        with self._wake:
            if self._closed:
                raise Cancelled("the decode engine is closed", "start the server again")
            if job.id in self._jobs:
                raise RequestError(f"request {job.id} is already running", "give every request an id of its own")
            if len(self._jobs) >= MAX_REQUESTS:
                raise Overloaded(f"{MAX_REQUESTS} requests are already in the decode engine", "try again later")
            self._jobs[job.id] = job
            self._waiting_bytes += _nbytes(job.kv)
            self._commands.append(lambda: self._insert(job))
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Forget a request at any stage; no call to its listener begins after this returns. Unknown ids are fine."""
        with self._lock:
            job = self._jobs.get(request_id)
        if job is None:
            return
        with job.lock:  # waits for a call to the listener that has begun
            job.open = False
        with self._wake:
            self._jobs.pop(request_id, None)
            self._commands.append(lambda: self._remove(job))
            self._wake.notify()

    def logits(self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None) -> list[list[float]]:
        """Logits [last, vocab] after each of the final `last` tokens; with `kv`, which covers tokens[:-last], only
        those are computed. Runs between two steps of the batch."""
        if not 1 <= last <= len(tokens):
            raise RequestError(f"logits of {last} tokens out of {len(tokens)} are asked for")
        if kv is not None:
            self._require_fitting(kv, len(tokens) - last)
        return self._call(lambda model: _logits(model, list(tokens), last, kv, self._options.chunk_tokens))

    def warm_up(self) -> None:
        """Run one handed-over and one self-computed request, so that the first real one finds all kernels built."""
        tokens = [0] * 8
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        waiting = [_Waiter(), _Waiter()]
        for index, (waiter, kv) in enumerate(zip(waiting, (_zero_kv(self._info, len(tokens) - 1), None), strict=True)):
            self.submit(DecodeRequest(f"warm-up-{index}", tokens, sampling, kv), waiter)
        for waiter in waiting:
            waiter.wait(_WARM_UP_DEADLINE_S)

    def close(self) -> None:
        """Stop the thread; running requests get Cancelled. Calling it twice is fine."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the caller's side ------------------------------------------------------------------------------------------

    def _job(self, request: DecodeRequest, listener: Listener) -> Job:
        if not request.tokens:
            raise RequestError("the prompt is empty", "give at least one token")
        mlx_sampling.validate(request.sampling)
        if request.kv is not None:
            self._require_fitting(request.kv, len(request.tokens) - 1)
        job = Job(request.id, list(request.tokens), request.sampling, request.kv, listener)
        job.timing.submitted = time.monotonic()
        return job

    def _require_fitting(self, kv: ReceivedKV, tokens: int) -> None:
        kv.layout.require_same(self._info.layout, mine="the transfer", theirs="the decode engine")
        if kv.tokens != tokens:
            raise LayoutMismatch(f"the KV covers {kv.tokens} tokens where {tokens} are needed", "send the whole prompt's KV")

    def _call(self, function: Callable[[Any], _Result]) -> _Result:
        """Run `function(model)` on the engine's thread and wait for it."""
        future: Future[_Result] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._prepared.model))
                except Exception as error:  # noqa: BLE001 - handed to the caller as it is
                    future.set_exception(error)

        with self._wake:
            if self._closed:
                raise Cancelled("the decode engine is closed", "start the server again")
            self._commands.append(command)
            self._calls.append(future)
            self._wake.notify()
        return future.result()
