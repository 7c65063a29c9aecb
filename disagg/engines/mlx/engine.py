"""DecodeEngine on mlx-lm: continuous batching over handed-over or self-computed KV.

One thread owns the model, the generator, its stream and every array. Other threads leave commands for it, which it
carries out between two steps; while nothing is left to do it sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from disagg.config import EngineOptions
from disagg.engines.base import DecodeRequest, EngineInfo, Listener
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.mlx import forward as mlx_forward
from disagg.engines.mlx import sampling as mlx_sampling
from disagg.engines.mlx.batch import Job
from disagg.engines.mlx.loop import Loop
from disagg.engines.mlx.patches import PATCHES, Patch
from disagg.engines.mlx.warm_up import warm_up
from disagg.engines.model.text import PromptTokenizer
from disagg.errors import LayoutMismatch, ModelError, RequestError
from disagg.kv.received import ReceivedKV


class MLXDecodeEngine:
    """See base.DecodeEngine. `source`: a checkpoint folder or hub id. `context`: tokens it is served with.

    The constructor loads the model. It raises ModelError where that fails and PreflightRefused where mlx-lm computes
    the model differently from its checkpoint's reference and no patch is known. `patches`: what may be mended.
    """

    def __init__(
        self, source: str | Path, context: int, options: EngineOptions, *, patches: Sequence[Patch] = PATCHES
    ) -> None:
        if options.threads not in (None, 1):
            raise ModelError(
                f"threads = {options.threads}: mlx's CPU backend computes on one thread and has no setting for more",
                "leave threads out for this host",
            )
        self._chunk_tokens = options.chunk_tokens
        self._loop = Loop(options)
        prepared = self._loop.start(source, context=context, patches=patches)
        self._info, self._tokenizer = prepared.info, prepared.tokenizer

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def tokenizer(self) -> PromptTokenizer:
        return self._tokenizer

    @property
    def kv_bytes(self) -> int:
        """Bytes of the batch's caches, with their padding. 0 when nothing runs."""
        return self._loop.kv_bytes

    @property
    def alive(self) -> bool:
        return self._loop.alive

    @property
    def running(self) -> int:
        return self._loop.running

    def allocate(self, nbytes: int) -> Any:
        """See DecodeEngine; from any thread."""
        return mlx_cache.allocate(nbytes)

    def submit(self, request: DecodeRequest, listener: Listener) -> None:
        """Queue a request. RequestError for bad sampling values or an id already here, LayoutMismatch where the KV is
        not this model's or not of tokens[:-1], Overloaded when too many wait, Cancelled after close,
        ModelError where the engine's thread has died."""
        if not request.tokens:
            raise RequestError("the prompt is empty", "give at least one token")
        mlx_sampling.validate(request.sampling)
        if request.kv is not None:
            self._require_fitting(request.kv, len(request.tokens) - 1)
        job = Job(request.id, list(request.tokens), request.sampling, request.kv, listener)
        job.timing.submitted = time.monotonic()
        self._loop.submit(job)

    def after_step(self, call: Callable[[], None]) -> None:
        """See DecodeEngine. Where `call` raises, the requests of the batch fail: nobody could hear of their tokens."""
        self._loop.after_step = call

    def cancel(self, request_id: str) -> None:
        """Forget a request at any stage; no call to its listener begins after this returns. Unknown ids are fine."""
        self._loop.cancel(request_id)

    def logits(self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None) -> list[list[float]]:
        """Logits [last, vocab] after each of the final `last` tokens; with `kv`, which covers tokens[:-last], only
        those are computed. Runs between two steps of the batch."""
        if not 1 <= last <= len(tokens):
            raise RequestError(f"logits of the last {last} of {len(tokens)} tokens are asked for", "ask for 1 to all")
        if kv is not None:
            self._require_fitting(kv, len(tokens) - last)
        return self._loop.call(lambda model: mlx_forward.logits(model, list(tokens), last, kv, self._chunk_tokens))

    def warm_up(self) -> None:
        """Run a handed-over and a self-computed request, so that the first real one finds every kernel built."""
        warm_up(self)

    def close(self) -> None:
        """Stop the thread; running requests get Cancelled. Calling it twice is fine."""
        self._loop.close()

    def _require_fitting(self, kv: ReceivedKV, tokens: int) -> None:
        kv.layout.require_same(self._info.layout, mine="the transfer", theirs="the decode engine")
        if kv.tokens != tokens:
            raise LayoutMismatch(
                f"the KV covers {kv.tokens} tokens where {tokens} are needed",
                "send the KV of the whole prompt but its end",
            )
