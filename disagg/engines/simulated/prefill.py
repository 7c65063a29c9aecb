"""A prefill engine without a model: it emits random KV of full size and layout at the predicted times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy

from disagg.api.names import AS_IS, WireForm
from disagg.api.sampling import Sampling
from disagg.config import EngineOptions
from disagg.engines.base import EngineInfo, PrefillTiming, Token
from disagg.engines.model.text import PromptTokenizer
from disagg.engines.simulated import model as simulated_model
from disagg.engines.simulated.model import sleep_until
from disagg.errors import Cancelled
from disagg.kv.blocks import Block, KVBlock
from disagg.kv.layout import Layout
from disagg.kv.wire import plane_bytes
from disagg.planning.decode import step
from disagg.planning.prefill import Emission

NOISE_BYTES = 64 << 20  # larger than a CPU's caches: sending must read memory, as with real KV


def _never() -> bool:
    return False


class SimulatedPrefillEngine:
    """A PrefillEngine. hardware: the simulated machine. source: see simulated_model.load."""

    def __init__(self, source: str | Path, context: int, options: EngineOptions, hardware: str) -> None:
        self._model = simulated_model.load(source, context, options, hardware)
        self._noise = _Noise(self.info.layout, options.chunk_tokens)

    @property
    def info(self) -> EngineInfo:
        return self._model.info

    @property
    def tokenizer(self) -> PromptTokenizer:
        return self._model.tokenizer

    def warm_up(self) -> None:
        """Nothing to do: the first request is as fast as any other."""

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block], None],
        *,
        cancelled: Callable[[], bool] = _never,
        chunk_tokens: int | None = None,
        wire: WireForm = AS_IS,
    ) -> PrefillTiming:
        """See PrefillEngine. Raises Cancelled between layers too."""
        started = time.monotonic()
        plan = self._model.prefill(len(tokens), chunk_tokens)
        for emission in plan.emissions:
            _refuse_cancelled(cancelled)
            sleep_until(started + emission.at)
            emit(self._noise.block(emission, wire))
        sleep_until(started + plan.seconds)
        return PrefillTiming(started, time.monotonic(), len(tokens))

    def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, cancelled: Callable[[], bool] = _never
    ) -> Iterator[Token]:
        """See PrefillEngine."""
        began = time.monotonic()
        plan = self._model.prefill(len(tokens) - 1)
        for chunk_end in plan.chunk_ends:
            _refuse_cancelled(cancelled)
            sleep_until(began + chunk_end)
        moment = began + plan.seconds
        machine, sizes, dtype = self._model.device, self._model.shape, self._model.options.dtype
        for index, token in enumerate(self._model.answer(tokens, sampling)):
            _refuse_cancelled(cancelled)
            moment += step(machine, sizes, len(tokens) + index, dtype)
            sleep_until(moment)
            yield token

    def logits(self, tokens: Sequence[int], last: int) -> list[list[float]]:
        """Raises ModelError: there are none."""
        raise simulated_model.no_logits()


class _Noise:
    """Blocks of random bytes: consecutive slices of one large buffer, starting over at its end."""

    def __init__(self, layout: Layout, chunk_tokens: int) -> None:
        self._layout = layout
        largest = max(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layout.layers)
        size = max(NOISE_BYTES, chunk_tokens * largest * layout.itemsize)
        self._buffer = memoryview(numpy.random.default_rng(0).bytes(size))
        self._next = 0

    def block(self, emission: Emission, wire: WireForm) -> KVBlock:
        layer = self._layout.layers[emission.layer]
        keys, values = (self._views(emission, layer.kv_heads, dim, wire) for dim in (layer.key_dim, layer.value_dim))
        return KVBlock(emission.layer, emission.start, emission.end, keys, values)

    def _views(self, emission: Emission, heads: int, dim: int, wire: WireForm) -> list[memoryview]:
        rows = emission.end - emission.start
        sizes = plane_bytes(dim, self._layout.itemsize, wire)
        return [view for size in sizes for view in self._heads(heads, rows * size)]

    def _heads(self, heads: int, size: int) -> list[memoryview]:
        if self._next + heads * size > len(self._buffer):
            self._next = 0
        first, self._next = self._next, self._next + heads * size
        return [self._buffer[first + head * size : first + (head + 1) * size] for head in range(heads)]


def _refuse_cancelled(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Cancelled("the request was cancelled while it was computed (simulated)")
