"""The two PrefillRuns, a prompt whose KV is emitted and a prompt with its answer; and the forward pass that they
run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from disagg.engines.base import ChunkScores, PromptAndAnswer, PromptRun, Token
from disagg.engines.transformers.cache import CachePlan, OnRows, OnState, PreallocatedCache
from disagg.engines.transformers.sampling import Sampler
from disagg.errors import ModelError


class TokensRun(PromptRun):
    """A PromptRun of all `tokens`, of which the cache already has some. on_done: called with the cache once all tokens
    are in it."""

    def __init__(
        self,
        forward: Forward,
        cache: PreallocatedCache,
        tokens: Sequence[int],
        chunk_tokens: int,
        on_done: Callable[[PreallocatedCache], None] = lambda cache: None,
    ) -> None:
        super().__init__(len(tokens), int(cache.get_seq_length()), chunk_tokens)
        self._forward = forward
        self._cache: PreallocatedCache | None = cache
        self._ids = tokens
        self._on_done = on_done

    @property
    def cache(self) -> PreallocatedCache:
        """The run's cache, until it is closed."""
        assert self._cache is not None, "the run is closed"
        return self._cache

    def close(self) -> None:
        self._cache = None

    def _compute(self, first: int, end: int) -> None:
        self._forward.layers(self._ids[first:end], self.cache)
        self._forward.finish()

    def _end(self) -> None:
        self._on_done(self.cache)


class ScoresRun(TokensRun):
    """A TokensRun that scores `tokens`, all but the first. emit: gets the scores of each chunk, with `top`
    alternatives of each token."""

    def __init__(
        self,
        forward: Forward,
        cache: PreallocatedCache,
        tokens: Sequence[int],
        chunk_tokens: int,
        *,
        top: int,
        emit: Callable[[ChunkScores], None],
    ) -> None:
        super().__init__(forward, cache, tokens[:-1], chunk_tokens)
        self._following, self._top, self._emit = tokens[1:], top, emit

    def _compute(self, first: int, end: int) -> None:
        ids, following = self._ids[first:end], self._following[first:end]
        self._emit(self._forward.scores(ids, following, self._top, self.cache))


class AnswerRun(PromptAndAnswer):
    """A PrefillRun of a prompt and its answer. prompt: computes all tokens before `last`. eos_ids: end the answer, of
    which at most `left` tokens are generated."""

    def __init__(
        self,
        forward: Forward,
        prompt: TokensRun,
        last: int,
        sampler: Sampler,
        emit: Callable[[Token], None],
        *,
        eos_ids: Collection[int],
        left: int,
    ) -> None:
        super().__init__(prompt, emit)
        self._forward = forward
        self._tokens_run = prompt
        self._last, self._left = last, left
        self._sampler = sampler
        self._eos_ids = eos_ids

    @property
    def done(self) -> bool:
        return self._left == 0

    def _next(self) -> Token:
        token = self._sampler.next(self._forward.logits([self._last], self._tokens_run.cache)[0])
        self._last = token.id
        self._left -= 1
        if token.id in self._eos_ids:
            self._left, token = 0, replace(token, finish="stop")
        elif self._left == 0:
            token = replace(token, finish="length")
        return token


# PyTorch has an exception of its own for CUDA only; these are the texts of its CPU and MPS allocators.
ALLOCATION_FAILED = ("DefaultCPUAllocator", "can't allocate memory", "out of memory")


class Forward:
    """The model on its device. free: called if its memory does not suffice, lets go of what can be spared. If that is
    not enough, or a chunk was being computed, a ModelError says so."""

    def __init__(self, model: Any, plan: CachePlan, device: torch.device, free: Callable[[], None]) -> None:
        self._model = model
        self._plan = plan
        self._device = device
        self._free = free
        self._running: PreallocatedCache | None = None
        if any(layer.states for layer in plan.layout.layers):
            for index, layer in enumerate(model.get_decoder().layers):
                layer.register_forward_hook(partial(self._layer_done, index))

    def cache(
        self, total: int, chunk: int, on_rows: OnRows | None = None, on_state: OnState | None = None
    ) -> PreallocatedCache:
        """An empty cache of `total` tokens, computed in chunks of at most `chunk`."""
        try:
            with self._memory_for(total):
                return PreallocatedCache(self._plan, total, chunk, self._device, on_rows, on_state=on_state)
        except ModelError:  # once more, with what was freed
            with self._memory_for(total):
                return PreallocatedCache(self._plan, total, chunk, self._device, on_rows, on_state=on_state)

    def layers(self, tokens: Sequence[int], cache: PreallocatedCache) -> None:
        """Run the next tokens through the layers, without the output head."""
        self._run(self._model.base_model, tokens, cache)

    def logits(self, tokens: Sequence[int], cache: PreallocatedCache) -> torch.Tensor:
        """Logits [len(tokens), vocab] after each of the next tokens."""
        logits: torch.Tensor = self._run(self._model, tokens, cache).logits[0]
        return logits

    def scores(
        self, tokens: Sequence[int], following: Sequence[int], top: int, cache: PreallocatedCache
    ) -> ChunkScores:
        """The scores of `following`, each of which follows one of the next tokens."""
        logits = self.logits(tokens, cache)
        with self._memory_for(cache.get_seq_length()), torch.inference_mode():
            rows = logits.float()
            chosen = rows.gather(1, torch.tensor(list(following), device=rows.device)[:, None])
            sums, best = rows.logsumexp(-1, keepdim=True), rows.topk(min(top, rows.shape[-1]))
            return ChunkScores(
                (chosen - sums)[:, 0].cpu().numpy(),
                ((rows > chosen).sum(-1, dtype=torch.int32) + 1).cpu().numpy(),
                best.indices.int().cpu().numpy(),
                (best.values - sums).cpu().numpy(),
            )

    def finish(self) -> None:
        """Wait for the device. Kernels run asynchronously, and a time must not be the one at which they were queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()

    def _run(self, module: Any, tokens: Sequence[int], cache: PreallocatedCache) -> Any:
        with self._memory_for(cache.get_seq_length() + len(tokens)), torch.inference_mode():
            ids = torch.tensor([list(tokens)], dtype=torch.long, device=self._device)
            cache.begin(len(tokens))
            self._running = cache
            try:
                return module(input_ids=ids, past_key_values=cache, use_cache=True)
            finally:
                self._running = None

    def _layer_done(self, index: int, module: Any, given: Any, made: Any) -> None:
        if self._running is not None:
            self._running.layer_done(index)

    @contextmanager
    def _memory_for(self, tokens: int) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._free()
            reason = str(error).splitlines()[0] if str(error) else "no memory left"
            raise ModelError(
                f"not enough memory for {tokens} tokens: {reason}", "lower chunk_tokens, or the model's context"
            ) from error


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in str(error) for text in ALLOCATION_FAILED
    )
