"""EmittingEngine on mlx-lm: a Mac that prefills for another one, all layers or the first of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from disagg.api.names import AS_IS, WireForm
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, ChunkScores, EmittingEngine, Logits, PromptAndAnswer, PromptRun, Token
from disagg.engines.base.scores import scored_chunk
from disagg.engines.mlx import memory
from disagg.engines.mlx import sampling as mlx_sampling
from disagg.engines.mlx.cache import exact
from disagg.engines.mlx.emit import Emitter
from disagg.engines.mlx.engine import logits_of
from disagg.engines.mlx.load import prepare, require_one_thread, select_device
from disagg.engines.mlx.prefix_cache import CachedPrefix, PinnedArrays, make_prefix_cache, rows, snapshot
from disagg.engines.mlx.scores import ScoringPass
from disagg.engines.mlx.span import Span, Spans
from disagg.engines.model.architectures.base import Patch
from disagg.engines.model.architectures.patches import MLX_PATCHES
from disagg.engines.model.bans import bans, ends_of
from disagg.engines.model.prefix_cache import LayerSnapshot, salted
from disagg.engines.process import lower_priority_of_thread
from disagg.errors import ModelError
from disagg.kv.blocks import Block

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class MLXPrefillEngine(EmittingEngine):
    """An EmittingEngine. source: a checkpoint folder or hub id. context: tokens of the longest prompt. patches: those
    to try.

    The model and every array belong to one thread of this engine, for which its methods wait. The constructor raises
    ModelError if the model cannot be loaded, PreflightRefused if mlx-lm computes another one than the checkpoint has.
    """

    _previous_wired_limit: int | None = None

    def __init__(
        self, source: str | Path, context: int, options: EngineOptions, *, patches: Sequence[Patch] = MLX_PATCHES
    ) -> None:
        require_one_thread(options)
        device = select_device(options.device)
        begin = lower_priority_of_thread if device == mx.cpu else _ignore
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlx-prefill", initializer=begin)
        self._stream: Any = self._thread.submit(mx.new_thread_local_stream, device).result()
        self._chunk_tokens = options.chunk_tokens
        try:
            self.on_thread(self._load, source, context, options, device, patches)
        except BaseException:
            self.close()
            raise

    def _load(self, source: str | Path, context: int, options: EngineOptions, device: Any, patches: Any) -> None:
        memory.bound_memory()
        loaded, info, self.tokenizer = prepare(source, options, context=context, device=device, patches=patches)
        self._previous_wired_limit = maybe_set_recommended_wired_limit()
        self.spans = Spans(loaded.model, info)
        self.model = loaded.model
        self.info = replace(info, split=self.spans.split)
        self._held = make_prefix_cache(loaded.model, options.max_held_bytes)

    def on_thread(self, call: Callable[_Given, _Result], *arguments: _Given.args, **options: _Given.kwargs) -> _Result:
        """Run a function where the model is, and wait for its result."""

        def run() -> _Result:
            with mx.stream(self._stream):
                return call(*arguments, **options)

        return self._thread.submit(run).result()

    def start(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block], None],
        *,
        start: int = 0,
        wire: WireForm = AS_IS,
        salt: str = "",
        chunk_tokens: int | None = None,
        layers: int | None = None,
    ) -> MLXRun:
        self.require_layers(layers)
        split = self.info.split
        head = layers if layers is not None and layers < split.layers else None
        span = self.spans(0, head or split.layers)
        emitter = Emitter(
            split.head(self.info.layout, head or split.layers),
            len(tokens),
            emit,
            wire,
            start,
            chunks=layers is not None,
        )
        known = tokens if head is None else tokens[:start]  # no hidden states are held
        name = salted(salt, head)
        held = self._held.find(known, name)
        run = MLXRun(self, span, tokens, held, chunk_tokens or self._chunk_tokens)
        run.emit(emitter, lambda caches: self._hold(name, tokens, caches))
        return run

    def start_answer(self, request: AnswerRequest, emit: Callable[[Token], None]) -> MLXAnswer:
        self.require_layers()
        tokens = request.tokens
        held = self._held.find(tokens[:-1], salted(request.salt, None))
        whole = self.spans(0, self.info.split.layers)
        left = request.sampling.max_tokens - request.answered
        prompt = MLXRun(self, whole, tokens[:-1], held, self._chunk_tokens, more=1 + left)
        return MLXAnswer(self, prompt, request, emit, eos_ids=self.info.eos_ids, left=left)

    def start_scores(self, tokens: Sequence[int], top: int, emit: Callable[[ChunkScores], None]) -> MLXScores:
        self.require_layers()
        chunk = scored_chunk(self._chunk_tokens, self.info.profile.vocab_size)
        return MLXScores(self, self.on_thread(ScoringPass, self.model, tokens, top, chunk), emit, chunk)

    def logits(self, tokens: Sequence[int], last: int, *, chunk_tokens: int | None = None) -> Logits:
        self.require_layers()
        return self.on_thread(logits_of, self.model, list(tokens), last, None, chunk_tokens or self._chunk_tokens)

    @property
    def held_bytes(self) -> int:
        return self._held.nbytes

    def clear_held(self) -> None:
        """Let go of all KV of finished prompts. On the thread."""
        self._held.clear()

    def close(self) -> None:
        """Restores the wired limit."""
        if self._previous_wired_limit is not None:
            self.on_thread(mx.set_wired_limit, self._previous_wired_limit)
            self._previous_wired_limit = None
        self._thread.shutdown()

    def _hold(self, salt: str, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Keep the KV of a prompt that is computed, unless there is no room for it. On the thread."""
        if sum(int(cache.nbytes) for cache in caches) > self._held.limit:
            return
        caches = [exact(cache) for cache in caches]
        last = snapshot(caches, len(tokens))
        if last is None and self._held.rewindable is not None:
            last = LayerSnapshot((None,) * len(caches), 0)  # the layers that need one are not computed here
        snapshots = {len(tokens): last} if last is not None else None
        self._held.add(tokens, salt, lambda start, end: rows(caches, start, end), snapshots)


class MLXRun(PromptRun):
    """A PromptRun of all `tokens`, through the layers of the span. held: KV that it begins with, released here. more:
    tokens that follow it in the same caches."""

    def __init__(
        self,
        engine: MLXPrefillEngine,
        span: Span,
        tokens: Sequence[int],
        held: PinnedArrays | None,
        chunk_tokens: int,
        *,
        more: int = 0,
    ) -> None:
        super().__init__(len(tokens), held.tokens if held is not None else 0, chunk_tokens)
        self._engine, self._span, self._ids = engine, span, tokens
        self._emitter: Emitter | None = None
        self._on_done: Callable[[Sequence[Any]], None] = _ignore
        self._caches: list[Any] | None = None
        try:
            prefix = held.read() if held is not None else None
            self._caches = engine.on_thread(self._begin, prefix, self.remaining + more)
        finally:
            if held is not None:
                held.release()

    @property
    def caches(self) -> list[Any]:
        """Of all layers, until the run is closed."""
        assert self._caches is not None, "the run is closed"
        return self._caches

    def emit(self, emitter: Emitter, on_done: Callable[[Sequence[Any]], None]) -> None:
        """Emit what is held, and from here on what is computed. on_done: gets the caches, once all tokens are in
        them."""
        self._emitter, self._on_done = emitter, on_done
        if self.held:
            self._engine.on_thread(self._emit, 0, self.held, None)

    def close(self) -> None:
        self._caches = self._emitter = None
        self._on_done = _ignore

    def _begin(self, held: CachedPrefix | None, room: int) -> list[Any]:
        caches = self._span.caches(held, room)
        mx.eval([cache.state for cache in self._span.own(caches)] if held is not None else [])
        return caches

    def _compute(self, first: int, end: int) -> None:
        self._engine.on_thread(self._chunk, first, end)

    def _chunk(self, first: int, end: int) -> None:
        try:
            hidden = self._span.run(self._ids[first:end], self.caches)
            self._emit(first, end, hidden)
            self._evaluate()
        except RuntimeError as error:  # mlx's, of its allocator for one
            self._engine.clear_held()
            raise ModelError(
                f"mlx cannot compute {end} tokens: {error}", "lower chunk_tokens, or the model's context"
            ) from error

    def _evaluate(self) -> None:
        """Wait for the caches, layer by layer unless they were emitted so."""
        states = [cache.state for cache in self._span.own(self.caches)]
        mx.async_eval(states)  # type: ignore[no-untyped-call]
        for state in states:
            mx.eval(state)
            if self._emitter is None:
                self._engine.on_beat()

    def _emit(self, first: int, end: int, hidden: Any) -> None:
        if self._emitter is not None:
            self._emitter.chunk(first, end, self._span.own(self.caches), hidden, self._engine.on_beat)

    def _end(self) -> None:
        self._engine.on_thread(self._on_done, self._span.own(self.caches))


class MLXAnswer(PromptAndAnswer):
    """A PrefillRun of a prompt and its answer, of which at most `left` tokens are generated. eos_ids: of the model."""

    def __init__(
        self,
        engine: MLXPrefillEngine,
        prompt: MLXRun,
        request: AnswerRequest,
        emit: Callable[[Token], None],
        *,
        eos_ids: Collection[int],
        left: int,
    ) -> None:
        super().__init__(prompt, emit)
        self._engine, self._run, self._request = engine, prompt, request
        self._ends, self._left = ends_of(request.sampling, eos_ids), left
        self._last = list(request.tokens)  # those that the sampler does not know yet
        answer = request.tokens[len(request.tokens) - request.answered :]
        banned = bans(request.sampling, eos_ids, request.bad_words, answer)
        self._adjusts = mlx_sampling.adjustment(request.sampling, request.answered, request.constraint, banned)
        self._sampler = mlx_sampling.sampler(request.sampling, request.answered)
        if request.constraint is not None:
            self._sampler = mlx_sampling.constrained(self._sampler, request.constraint, banned)

    @property
    def done(self) -> bool:
        return self._left == 0

    def _next(self) -> Token:
        token = self._engine.on_thread(self._token)
        if self._request.constraint is not None and self._request.constraint.error is not None:
            raise self._request.constraint.error
        self._last = [token.id]
        self._left -= 1
        if token.id in self._ends:
            self._left, token = 0, replace(token, finish="stop")
        elif self._left == 0:
            token = replace(token, finish="length")
        self._engine.on_beat()
        return token

    def _token(self) -> Token:
        raw = self._engine.model(mx.array([self._last[-1:]]), cache=self._run.caches)[:, -1].astype(mx.float32)
        logits = raw
        if self._adjusts is not None:
            logits = self._adjusts(mx.array(self._last), raw)
            self._adjusts.raw.clear()
        chosen = int(self._sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)).item())
        row, wanted = mlx_sampling.read_row(raw), self._request.sampling.logprobs or 0
        top = mlx_sampling.top_logprobs(mlx_sampling.log_softmax(row), wanted) if wanted else ()
        return Token(chosen, mlx_sampling.log_probability(row, chosen), top)


class MLXScores(PromptRun):
    """A PromptRun that scores a prompt. emit: gets the scores of each chunk."""

    def __init__(
        self, engine: MLXPrefillEngine, scoring: ScoringPass, emit: Callable[[ChunkScores], None], chunk_tokens: int
    ) -> None:
        super().__init__(scoring.remaining, 0, chunk_tokens)
        self._engine, self._scoring, self._emit = engine, scoring, emit

    def close(self) -> None:
        self._scoring.close()

    def _compute(self, first: int, end: int) -> None:
        while first < end:
            scores = self._engine.on_thread(self._scoring.step, end - first)
            first += len(scores.logprobs)
            self._engine.on_beat()
            self._emit(scores)


def _ignore(*_: Any) -> None:
    pass
