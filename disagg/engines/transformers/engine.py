"""EmittingEngine on PyTorch and transformers: emits KV layer by layer while it is computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import numpy.typing
import torch
import transformers

from disagg.api.names import AS_IS, WireForm
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, ChunkScores, EmittingEngine, Logits, Token
from disagg.engines.base.scores import scored_chunk
from disagg.engines.model.architectures import architecture_of
from disagg.engines.model.architectures.base import cached_layers
from disagg.engines.model.reference import Reference
from disagg.engines.staging import RowEmitter
from disagg.engines.transformers.cache import CachePlan, PreallocatedCache
from disagg.engines.transformers.layers import make_prefix_cache
from disagg.engines.transformers.load import choose_device, load_model, weight_bytes
from disagg.engines.transformers.profile import measure
from disagg.engines.transformers.runs import AnswerRun, Forward, ScoresRun, TokensRun, is_out_of_memory
from disagg.engines.transformers.sampling import Sampler
from disagg.kv.blocks import Block

_log = logging.getLogger(__name__)


class TransformersPrefillEngine(EmittingEngine):
    """A EmittingEngine."""

    def __init__(self, source: str | Path, context: int, options: EngineOptions) -> None:
        """Load the model in folder (or hub id) `source` to serve `context` tokens. ModelError if that fails,
        PreflightRefused if transformers does not compute what the checkpoint describes."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        reference = Reference.open(source, context)
        self.tokenizer = reference.tokenizer
        self._device = choose_device(options.device)
        self._model = load_model(reference.path, options, self._device)
        self._chunk_tokens = options.chunk_tokens
        actual = measure(self._model, reference.profile)
        findings = reference.verdict(actual)
        self._layout = reference.layout(options.dtype)
        self._held = make_prefix_cache(self._layout, options.max_held_bytes)
        self._forward = Forward(self._model, self._kept(), self._device, self._held.clear)
        self.info = reference.info(
            actual,
            findings,
            options.dtype,
            backend=f"transformers/{self._device.type}",
            versions={"transformers": transformers.__version__, "torch": str(torch.__version__)},
            memory_bytes=weight_bytes(self._model),
            weights=reference.weights(options.dtype, options.quantization),
        )

    def warm_up(self) -> None:
        for _ in self.generate([0] * min(64, self.info.profile.context - 2), Sampling(max_tokens=2, ignore_eos=True)):
            pass
        self.info = replace(self.info, evidence=self.evidence())

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
        emitter = RowEmitter(self._layout, len(tokens), self._device, emit, wire=wire, start=start)
        cache = self._cache(salt, tokens, len(tokens), chunk_tokens or self._chunk_tokens, emitter)

        def hold(cache: PreallocatedCache) -> None:
            self._hold(salt, tokens, cache)

        return TokensRun(self._forward, cache, tokens, chunk_tokens or self._chunk_tokens, hold)

    def start_answer(self, request: AnswerRequest, emit: Callable[[Token], None]) -> AnswerRun:
        tokens, sampling, left = request.tokens, request.sampling, request.sampling.max_tokens - request.answered
        cache = self._cache(request.salt, tokens[:-1], len(tokens) + left, self._chunk_tokens)
        prompt = TokensRun(self._forward, cache, tokens[:-1], self._chunk_tokens)
        sampler = Sampler(sampling, tokens, request.answered, request.constraint)
        eos_ids = () if sampling.ignore_eos else self.info.eos_ids
        return AnswerRun(self._forward, prompt, tokens[-1], sampler, emit, eos_ids=eos_ids, left=left)

    def start_scores(self, tokens: Sequence[int], top: int, emit: Callable[[ChunkScores], None]) -> ScoresRun:
        chunk = scored_chunk(self._chunk_tokens, self.info.profile.vocab_size)
        cache = self._forward.cache(len(tokens) - 1, min(chunk, len(tokens) - 1), lambda *_: self.on_beat())
        return ScoresRun(self._forward, cache, tokens, chunk, top=top, emit=emit)

    def logits(self, tokens: Sequence[int], last: int, *, chunk_tokens: int | None = None) -> Logits:
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

    def _kept(self) -> CachePlan:
        config = self._model.config.get_text_config(decoder=True)
        return CachePlan(
            self._layout, architecture_of(config), tuple(cached_layers(config)), int(config.num_hidden_layers)
        )

    def _cache(
        self, salt: str, tokens: Sequence[int], total: int, chunk: int, emitter: RowEmitter | None = None
    ) -> PreallocatedCache:
        """A cache of `total` tokens that begins with what is held of `tokens`."""

        def beat(layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            self.on_beat()
            if emitter is not None:
                emitter(layer, start, keys, values)

        cache = self._forward.cache(total, min(chunk, total), beat, emitter.state if emitter is not None else None)
        if held := self._held.find(tokens, salt):
            try:
                cache.load(held.read())
            finally:
                held.release()
        return cache

    def _hold(self, salt: str, tokens: Sequence[int], cache: PreallocatedCache) -> None:
        """Keep the KV of a prompt that is computed, unless there is no room for it."""
        if self._layout.nbytes(len(tokens)) > self._held.limit:
            return
        try:
            last = cache.snapshot()
            self._held.add(tokens, salt, cache.rows, {len(tokens): last} if last is not None else None)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("the KV of a prompt of %d tokens could not be held: %s", len(tokens), error)
