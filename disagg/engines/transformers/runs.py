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
from disagg.engines.staging import RowEmitter
from disagg.engines.transformers.cache import CachePlan, OnRows, OnState, PreallocatedCache
from disagg.engines.transformers.load import decoder_layers
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


class ChunksRun(TokensRun):
    """A TokensRun whose chunks can be used one by one: each ends with the hidden states after the model's first
    `layers` layers, unless these are all."""

    def __init__(
        self,
        forward: Forward,
        cache: PreallocatedCache,
        tokens: Sequence[int],
        chunk_tokens: int,
        on_done: Callable[[PreallocatedCache], None],
        *,
        emitter: RowEmitter,
        layers: int,
    ) -> None:
        super().__init__(forward, cache, tokens, chunk_tokens, on_done)
        self._emitter, self._layers = emitter, layers
        emitter.chunk_end(0, self.held)

    def _compute(self, first: int, end: int) -> None:
        hidden = self._forward.head(self._ids[first:end], self.cache, self._layers)
        if hidden is not None:
            self._emitter.hidden(first, hidden)
        self._forward.finish()
        self._emitter.chunk_end(first, end)


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
    """A PrefillRun of a prompt and its answer. prompt: computes all tokens before `last`. ends: the tokens that
    end the answer, of which at most `left` tokens are generated."""

    def __init__(
        self,
        forward: Forward,
        prompt: TokensRun,
        last: int,
        sampler: Sampler,
        emit: Callable[[Token], None],
        *,
        ends: Collection[int],
        left: int,
    ) -> None:
        super().__init__(prompt, emit)
        self._forward = forward
        self._tokens_run = prompt
        self._last, self._left = last, left
        self._sampler = sampler
        self._ends = ends

    @property
    def done(self) -> bool:
        return self._left == 0

    def _next(self) -> Token:
        token = self._sampler.next(self._forward.logits([self._last], self._tokens_run.cache)[0])
        self._last = token.id
        self._left -= 1
        if token.id in self._ends:
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
        self._last: int | None = None  # the layer after which the running pass ends; None: the model's last
        for index, layer in enumerate(decoder_layers(model)):
            layer.register_forward_hook(partial(self._layer_done, index))

    def cache(
        self,
        total: int,
        chunk: int,
        on_rows: OnRows | None = None,
        on_state: OnState | None = None,
        *,
        layers: int | None = None,
    ) -> PreallocatedCache:
        """An empty cache of `total` tokens, computed in chunks of at most `chunk`. layers: for the model's first so
        many; None: all."""
        make = partial(PreallocatedCache, self._plan, total, chunk, self._device, on_rows)
        try:
            with self._memory_for(total):
                return make(on_state=on_state, layers=layers)
        except ModelError:  # once more, with what was freed
            with self._memory_for(total):
                return make(on_state=on_state, layers=layers)

    def layers(self, tokens: Sequence[int], cache: PreallocatedCache) -> None:
        """Run the next tokens through the layers, without the output head."""
        self._run(self._model.base_model, tokens, cache)

    def head(self, tokens: Sequence[int], cache: PreallocatedCache, layers: int) -> torch.Tensor | None:
        """Run the next tokens through the model's first `layers` layers. Returns the hidden states after the last of
        them, [1, tokens, hidden]; None if these are all layers. ModelError if it passes on anything else."""
        if layers >= self._plan.split.layers:
            self.layers(tokens, cache)
            return None
        self._last = layers - 1
        try:
            self._run(self._model.base_model, tokens, cache)
        except _HeadComputed as computed:
            cache.end()
            return self._hidden(computed.made, len(tokens))
        finally:
            self._last = None
        raise AssertionError("the pass did not end after its last layer")

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
                return module(input_ids=ids, use_cache=True, **{self._plan.architecture.cache_argument: cache})
            finally:
                self._running = None

    def _hidden(self, made: Any, tokens: int) -> torch.Tensor:
        """The hidden states among what a layer returns. Some layers return more, which nobody reads."""
        hidden = made[0] if isinstance(made, tuple | list) else made
        split, dtype = self._plan.split, getattr(torch, self._plan.layout.dtype)
        if tuple(hidden.shape) != (1, tokens, split.hidden) or hidden.dtype != dtype:
            raise ModelError(
                f"a layer passes on {tuple(hidden.shape)} {hidden.dtype}, not {(1, tokens, split.hidden)} {dtype}",
                "this architecture cannot be divided between hosts",
            )
        return hidden

    def _layer_done(self, index: int, module: Any, given: Any, made: Any) -> None:
        if self._running is None:
            return
        self._running.layer_done(index)
        if index == self._last:
            raise _HeadComputed(made)

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


class _HeadComputed(Exception):
    """Ends a pass after the last layer that is wanted, whatever the model does with its layers afterwards. made: what
    that layer returned."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        text in str(error) for text in ALLOCATION_FAILED
    )
