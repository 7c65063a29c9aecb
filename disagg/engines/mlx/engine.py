"""DecodeEngine on mlx-lm: continuous batching over received or locally computed KV.

One thread (`loop`) owns the model, the generators, their stream and every array. Other threads queue commands for it,
which it runs between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy
import numpy.typing
from mlx_lm.models.cache import make_prompt_cache

from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import DecodeEngine, DecodeRequest, DecodeTiming, EngineInfo, HeldKV, Listener, Token
from disagg.engines.base.audit import UNBOUNDED
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.mlx import sampling as mlx_sampling
from disagg.engines.mlx.batching.job import Job
from disagg.engines.mlx.loop import Loop
from disagg.engines.mlx.patches import PATCHES, Patch
from disagg.engines.model.evidence import gather
from disagg.engines.model.held import PinnedPrefix
from disagg.engines.model.text import PromptTokenizer
from disagg.errors import LayoutMismatch, ModelError, RequestError
from disagg.kv.arena import Arenas
from disagg.kv.received import ByteRanges, ReceivedKV

_WARM_UP_PROMPT = [0] * 8
_WARM_UP_TOKENS = 4
_WARM_UP_S = 600.0  # a large model's first step on a cold disk


class MLXDecodeEngine:
    """See base.DecodeEngine. source: a checkpoint folder or hub id. context: in tokens. patches: those to try.

    The constructor loads the model. It raises ModelError if that fails, and PreflightRefused if mlx-lm computes the
    model differently from its checkpoint's reference and no patch corrects it.
    """

    def __init__(
        self, source: str | Path, context: int, options: EngineOptions, *, patches: Sequence[Patch] = PATCHES
    ) -> None:
        if options.threads not in (None, 1):
            raise ModelError(
                f"threads = {options.threads}: mlx's CPU backend computes on one thread and has no setting for more",
                "remove threads from this host's engine options",
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
        """Bytes of the batch's caches, with their padding; 0 if nothing runs."""
        return self._loop.kv_bytes

    @property
    def alive(self) -> bool:
        return self._loop.alive

    @property
    def running(self) -> int:
        return self._loop.running

    def allocate(self, nbytes: int) -> Any:
        """Callable from any thread."""
        return mlx_cache.allocate(nbytes)

    def submit(self, request: DecodeRequest, listener: Listener) -> None:
        """Queue a request. RequestError for invalid sampling values or an id in use, LayoutMismatch if the KV is not
        this model's or not of the tokens that it must cover, Overloaded if the engine is full, Cancelled after close,
        ModelError if the engine's thread has ended."""
        if not request.tokens:
            raise RequestError("the prompt is empty", "give at least one token")
        mlx_sampling.validate(request.sampling)
        if request.answered and request.answered >= min(len(request.tokens), request.sampling.max_tokens):
            raise RequestError(
                f"{request.answered} tokens of the answer are given: it has at most {request.sampling.max_tokens}",
                "end the request, its answer is complete",
            )
        held = request.held
        if held is not None and (not isinstance(held, PinnedPrefix) or not 0 < held.tokens < len(request.tokens)):
            raise LayoutMismatch("the held KV is not of this prompt", "take it from find_held of the same engine")
        if request.kv is not None:
            self._require_fitting(request.kv, len(request.tokens) - 1, held.tokens if held is not None else 0)
        job = Job(
            request.id,
            list(request.tokens),
            request.sampling,
            request.kv,
            listener,
            held=held,
            answered=request.answered,
            salt=request.salt,
            constraint=request.constraint,
            hold_prompt=request.hold_prompt,
            audit=request.audit,
        )
        job.timing.submitted = time.monotonic()
        self._loop.submit(job)

    def after_step(self, call: Callable[[], None]) -> None:
        """If `call` raises, the requests of the batch fail, since their tokens are not delivered."""
        self._loop.after_step = call

    @property
    def on_beat(self) -> Callable[[], None]:
        return self._loop.on_beat

    @on_beat.setter
    def on_beat(self, call: Callable[[], None]) -> None:
        self._loop.on_beat = call

    def cancel(self, request_id: str, dropped: Callable[[], None] = lambda: None) -> None:
        self._loop.cancel(request_id, dropped)

    def find_held(self, tokens: Sequence[int], salt: str) -> HeldKV | None:
        return self._loop.held.find(tokens[:-1], salt)

    @property
    def held_bytes(self) -> int:
        return self._loop.held.nbytes

    def give_up_held(self, nbytes: int) -> None:
        self._loop.give_up_held(nbytes)

    def forget_held(self, tokens: Sequence[int], salt: str) -> None:
        self._loop.forget_held(tokens, salt)

    def logits(
        self, tokens: Sequence[int], last: int, kv: ReceivedKV | None = None, *, chunk_tokens: int | None = None
    ) -> numpy.typing.NDArray[numpy.float32]:
        """Runs between two steps of the batch."""
        if not 1 <= last <= len(tokens):
            raise RequestError(f"cannot return logits of the last {last} of {len(tokens)} tokens", "request 1 to all")
        if kv is not None:
            self._require_fitting(kv, len(tokens) - last)
        chunk = chunk_tokens or self._chunk_tokens
        return self._loop.call(lambda model: _logits(model, list(tokens), last, kv, chunk))

    def warm_up(self) -> None:
        """One request with KV and one without, so that all kernels are compiled."""
        audits = _run_once(self)
        self.give_up_held(self.held_bytes)  # the KV of its requests is not that of their tokens
        evidence = gather(self.tokenizer, self._info.layout, self._info.profile.context, self._likeliest)
        self._info = replace(self._info, evidence=evidence, audits=audits)

    def close(self) -> None:
        """Stop the thread; running requests get Cancelled. Safe to call twice."""
        self._loop.close()

    def _likeliest(self, tokens: Sequence[int], last: int) -> Sequence[int]:
        return [int(token) for token in self.logits(tokens, last).argmax(-1)]

    def _require_fitting(self, kv: ReceivedKV, tokens: int, start: int = 0) -> None:
        kv.layout.require_same(self._info.layout, mine="the transfer", theirs="the decode engine")
        if (kv.start, kv.tokens) != (start, tokens):
            raise LayoutMismatch(
                f"the KV covers tokens [{kv.start}, {kv.tokens}), but [{start}, {tokens}) are needed",
                "send the KV of all prompt tokens that are not held, but the last ones",
            )


def _logits(
    model: Any, tokens: list[int], last: int, kv: ReceivedKV | None, chunk_tokens: int
) -> numpy.typing.NDArray[numpy.float32]:
    """One teacher-forced pass outside the batch. Runs on the engine's thread."""
    caches = make_prompt_cache(model) if kv is None else mlx_cache.build(model, kv)
    first = len(tokens) - last
    for start in range(first if kv else 0, first, chunk_tokens):
        model(mx.array([tokens[start : min(start + chunk_tokens, first)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return numpy.array(model(mx.array([tokens[first:]]), cache=caches)[0].astype(mx.float32))


def _run_once(engine: DecodeEngine) -> bool:
    """Run one request with KV (zeros), which is audited, and one that computes its prompt, together in one batch.
    Returns whether the audit worked. ModelError if the requests fail or take longer than ten minutes."""
    sampling = Sampling(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    waiters = []
    for name, kv in (("handed-over", _zero_kv(engine, len(_WARM_UP_PROMPT) - 1)), ("alone", None)):
        waiters.append(_Waiter())
        request = DecodeRequest(f"warm-up-{name}", _WARM_UP_PROMPT, sampling, kv, audit=UNBOUNDED)
        engine.submit(request, waiters[-1])
    handed_over, _ = [waiter.wait() for waiter in waiters]
    return handed_over.audit is not None


def _zero_kv(engine: DecodeEngine, tokens: int) -> ReceivedKV:
    """KV of `tokens` tokens, all zeros, in the model's layout."""
    layout = engine.info.layout
    arena = Arenas(engine.allocate).acquire(ByteRanges.of(layout, tokens).nbytes)
    arena.data[:] = 0
    return ReceivedKV(layout, tokens, arena)


class _Waiter:
    """A listener that waits for the end of its request."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._timing = DecodeTiming()

    def on_tokens(self, tokens: Sequence[Token], timing: DecodeTiming) -> None:
        self._timing = timing
        if any(token.finish for token in tokens):
            self._ended.set()

    def on_error(self, error: Exception) -> None:
        self._error = error
        self._ended.set()

    def wait(self) -> DecodeTiming:
        if not self._ended.wait(_WARM_UP_S):
            raise ModelError(f"the warm-up did not end in {_WARM_UP_S:.0f} s", "check the host's load and memory")
        if self._error is not None:
            raise ModelError(f"the warm-up failed: {self._error}") from self._error
        return self._timing
