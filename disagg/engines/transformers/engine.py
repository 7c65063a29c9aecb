"""EmittingEngine on PyTorch and transformers: emits KV layer by layer while it is computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy
import numpy.typing
import torch
import transformers

from disagg.api.names import AS_IS, WireForm
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, ChunkScores, EmittingEngine, Logits, Token
from disagg.engines.base.scores import scored_chunk
from disagg.engines.model.architectures import architecture_of
from disagg.engines.model.architectures.base import LoadedByTransformers, Patch
from disagg.engines.model.architectures.patches import TRANSFORMERS_PATCHES
from disagg.engines.model.bans import bans, ends_of
from disagg.engines.model.prefix_cache import salted
from disagg.engines.model.profile import verdict
from disagg.engines.model.reference import Reference
from disagg.engines.staging import RowEmitter
from disagg.engines.transformers.cache import CachePlan, PreallocatedCache
from disagg.engines.transformers.layers import make_prefix_cache
from disagg.engines.transformers.load import choose_device, load_model, weight_bytes
from disagg.engines.transformers.profile import measure
from disagg.engines.transformers.runs import AnswerRun, ChunksRun, Forward, ScoresRun, TokensRun, is_out_of_memory
from disagg.engines.transformers.sampling import Sampler
from disagg.kv.blocks import Block

_log = logging.getLogger(__name__)


class TransformersPrefillEngine(EmittingEngine):
    """A EmittingEngine."""

    def __init__(
        self,
        source: str | Path,
        context: int,
        options: EngineOptions,
        *,
        patches: Sequence[Patch] = TRANSFORMERS_PATCHES,
    ) -> None:
        """Load the model in folder (or hub id) `source` to serve `context` tokens. patches: those to try. ModelError if
        that fails, PreflightRefused if transformers does not compute what the checkpoint describes."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        reference = Reference.open(source, context)
        reference.require_readable("transformers")
        self.tokenizer = reference.tokenizer
        self._device = choose_device(options.device)
        loaded = reference.loaded(options)
        self._model = load_model(reference.path, options, self._device, loaded)
        self._chunk_tokens = options.chunk_tokens
        described = reference.described(loaded)
        by_transformers = LoadedByTransformers(self._model, reference.text_config)
        patched = [finding for patch in patches for finding in patch.apply(by_transformers)]
        actual = measure(self._model, described)
        findings = verdict(described, actual, patched)
        self._layout = reference.layout(options.dtype)
        self._held = make_prefix_cache(self._layout, options.max_held_bytes)
        plan = CachePlan(self._layout, reference.split, architecture_of(reference.text_config))
        self._forward = Forward(self._model, plan, self._device, self._held.clear)
        self.info = reference.info(
            actual,
            findings,
            options.dtype,
            backend=f"transformers/{self._device.type}",
            versions={"transformers": transformers.__version__, "torch": str(torch.__version__)},
            memory_bytes=weight_bytes(self._model),
            weights=reference.weights(options.dtype, options.quantization),
            loaded=loaded,
        )

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
    ) -> TokensRun:
        self.require_layers(layers)
        chunk = chunk_tokens or self._chunk_tokens
        head = layers if layers is not None and layers < self.info.split.layers else None
        emitter = RowEmitter(
            self._layout, len(tokens), self._device, emit, wire=wire, start=start, chunks=layers is not None
        )
        known = tokens if head is None else tokens[:start]  # no hidden states are held
        cache = self._cache(salt, known, len(tokens), chunk, emitter, head=head)
        hold = partial(self._hold, salt, tokens, head)
        if layers is None:
            return TokensRun(self._forward, cache, tokens, chunk, hold)
        return ChunksRun(self._forward, cache, tokens, chunk, hold, emitter=emitter, layers=layers)

    def start_answer(self, request: AnswerRequest, emit: Callable[[Token], None]) -> AnswerRun:
        self.require_layers()
        tokens, sampling, left = request.tokens, request.sampling, request.sampling.max_tokens - request.answered
        cache = self._cache(request.salt, tokens[:-1], len(tokens) + left, self._chunk_tokens)
        prompt = TokensRun(self._forward, cache, tokens[:-1], self._chunk_tokens)
        banned = bans(sampling, self.info.eos_ids, request.bad_words, tokens[len(tokens) - request.answered :])
        sampler = Sampler(sampling, tokens, request.answered, request.constraint, banned)
        ends = ends_of(sampling, self.info.eos_ids)
        return AnswerRun(self._forward, prompt, tokens[-1], sampler, emit, ends=ends, left=left)

    def start_scores(self, tokens: Sequence[int], top: int, emit: Callable[[ChunkScores], None]) -> ScoresRun:
        self.require_layers()
        chunk = scored_chunk(self._chunk_tokens, self.info.profile.vocab_size)
        cache = self._forward.cache(len(tokens) - 1, min(chunk, len(tokens) - 1), lambda *_: self.on_beat())
        return ScoresRun(self._forward, cache, tokens, chunk, top=top, emit=emit)

    def logits(self, tokens: Sequence[int], last: int, *, chunk_tokens: int | None = None) -> Logits:
        self.require_layers()
        head, chunk = len(tokens) - last, chunk_tokens or self._chunk_tokens
        cache = self._forward.cache(len(tokens), min(max(chunk, self._chunk_tokens), len(tokens)))
        prompt = TokensRun(self._forward, cache, tokens[:head], chunk)
        while not prompt.done:
            prompt.step()
        rows = [
            self._forward.logits(tokens[start : start + self._chunk_tokens], prompt.cache).float().cpu().numpy()
            for start in range(head, len(tokens), self._chunk_tokens)
        ]
        return numpy.concatenate(rows)

    @property
    def held_bytes(self) -> int:
        return self._held.nbytes

    def _cache(
        self,
        salt: str,
        tokens: Sequence[int],
        total: int,
        chunk: int,
        emitter: RowEmitter | None = None,
        *,
        head: int | None = None,
    ) -> PreallocatedCache:
        """A cache of `total` tokens that begins with what is held of `tokens`. head: for the model's first so many
        layers; None: all."""

        def beat(layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            self.on_beat()
            if emitter is not None:
                emitter(layer, start, keys, values)

        on_state = emitter.state if emitter is not None else None
        cache = self._forward.cache(total, min(chunk, total), beat, on_state, layers=head)
        if held := self._held.find(tokens, salted(salt, head)):
            try:
                cache.load(held.read())
            finally:
                held.release()
        return cache

    def _hold(self, salt: str, tokens: Sequence[int], head: int | None, cache: PreallocatedCache) -> None:
        """Keep the KV of a prompt that is computed, of the model's first `head` layers, unless there is no room for
        it."""
        split = self.info.split
        if split.head(self._layout, head or split.layers).nbytes(len(tokens)) > self._held.limit:
            return
        try:
            last = cache.snapshot()
            self._held.add(tokens, salted(salt, head), cache.rows, {len(tokens): last} if last is not None else None)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("the KV of a prompt of %d tokens could not be held: %s", len(tokens), error)
