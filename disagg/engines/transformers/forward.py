"""A loaded model's forward pass, with its caches and its failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from disagg.engines.transformers.cache import CachePlan, OnRows, OnState, PreallocatedCache
from disagg.errors import ModelError

# PyTorch has an exception of its own for CUDA only; these are the texts of its CPU and MPS allocators.
ALLOCATION_FAILED = ("DefaultCPUAllocator", "can't allocate memory", "out of memory")


class Forward:
    """The model on its device. free: called if its memory does not suffice, lets go of what can be spared. If that is
    not enough, or a chunk was being computed, a ModelError says so."""

    def __init__(self, model: Any, kept: CachePlan, device: torch.device, free: Callable[[], None]) -> None:
        self._model = model
        self._kept = kept
        self._device = device
        self._free = free
        self._running: PreallocatedCache | None = None
        if any(layer.states for layer in kept.layout.layers):
            for index, layer in enumerate(model.get_decoder().layers):
                layer.register_forward_hook(partial(self._layer_done, index))

    def cache(
        self, total: int, chunk: int, on_rows: OnRows | None = None, on_state: OnState | None = None
    ) -> PreallocatedCache:
        """An empty cache of `total` tokens, computed in chunks of at most `chunk`."""
        try:
            with self._memory_for(total):
                return PreallocatedCache(self._kept, total, chunk, self._device, on_rows, on_state=on_state)
        except ModelError:  # once more, with what was freed
            with self._memory_for(total):
                return PreallocatedCache(self._kept, total, chunk, self._device, on_rows, on_state=on_state)

    def layers(self, tokens: Sequence[int], cache: PreallocatedCache) -> None:
        """Run the next tokens through the layers, without the output head."""
        self._run(self._model.base_model, tokens, cache)

    def logits(self, tokens: Sequence[int], cache: PreallocatedCache) -> torch.Tensor:
        """Logits [len(tokens), vocab] after each of the next tokens."""
        logits: torch.Tensor = self._run(self._model, tokens, cache).logits[0]
        return logits

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
