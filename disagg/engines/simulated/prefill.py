"""A prefill engine without a model: it emits random KV of full size and layout at the predicted times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import numpy.typing

from disagg.api.layout import Layout, plane_bytes
from disagg.api.names import AS_IS, WireForm
from disagg.config import EngineOptions
from disagg.engines.base import AnswerRequest, EmittingEngine, Logits, PromptAndAnswer, PromptRun, Token
from disagg.engines.simulated import model as simulated_model
from disagg.engines.simulated.model import CountedKV, SimulatedModel, sleep_until
from disagg.kv.blocks import Block, KVBlock, StateBlock
from disagg.planning.times import Emission, step

NOISE_BYTES = 64 << 20  # larger than a CPU's caches: sending must read memory, as with real KV


class SimulatedPrefillEngine(EmittingEngine):
    """A EmittingEngine. hardware: the simulated machine. source: see simulated_model.load."""

    def __init__(self, source: str | Path, context: int, options: EngineOptions, hardware: str) -> None:
        self._model = simulated_model.load(source, context, options, hardware)
        self.info, self.tokenizer = self._model.info, self._model.tokenizer
        self._noise = _Noise(self.info.layout, options.chunk_tokens)
        self._held = CountedKV(self.info.layout, options.max_held_bytes)

    def warm_up(self) -> None:
        """Nothing to do: the first request is as fast as any other."""

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
    ) -> _PromptRun:

        def send(emission: Emission) -> None:
            self.on_beat()
            if emission.end > start:
                emit(self._noise.block(replace(emission, start=max(start, emission.start)), wire))

        held = self._find(tokens, salt)
        for index, layer in enumerate(self.info.layout.layers):
            if rows := layer.rows(len(tokens))[: max(0, held - layer.rows(len(tokens)).start)]:
                send(Emission(index, rows.start, rows.stop, 0.0))

        def computed() -> None:
            for index, layer in enumerate(self.info.layout.layers):
                if layer.states:
                    emit(self._noise.states(index))
            self._held.hold(tokens, (), salt)

        if held == len(tokens) > 0:
            computed()
        return _PromptRun(self._model, len(tokens), send, held, chunk_tokens, computed=computed)

    def start_answer(self, request: AnswerRequest, emit: Callable[[Token], None]) -> _AnswerRun:
        tokens, sampling, answered = request.tokens, request.sampling, request.answered
        held = self._find(tokens[:-1], request.salt)
        prompt = _PromptRun(self._model, len(tokens) - 1, lambda emission: self.on_beat(), held)
        answer = self._model.answer(tokens[: len(tokens) - answered], sampling, answered, request.constraint)
        return _AnswerRun(self._model, prompt, len(tokens), answer, emit, done=answered >= sampling.max_tokens)

    @property
    def held_bytes(self) -> int:
        return self._held.store.nbytes

    def _find(self, tokens: Sequence[int], salt: str) -> int:
        """How many of these tokens are held."""
        found = self._held.store.find(tokens, salt)
        if found is None:
            return 0
        found.release()
        return found.tokens

    def logits(self, tokens: Sequence[int], last: int, *, chunk_tokens: int | None = None) -> Logits:
        """Raises ModelError: there are none."""
        raise simulated_model.no_logits()


class _PromptRun(PromptRun):
    """A PromptRun that sleeps as long as each step is predicted to take. computed: called after the last one."""

    def __init__(
        self,
        model: SimulatedModel,
        tokens: int,
        emit: Callable[[Emission], None],
        held: int,
        chunk_tokens: int | None = None,
        *,
        computed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(tokens, held, chunk_tokens or model.options.chunk_tokens)
        self._model, self._emit, self._computed = model, emit, computed

    def _compute(self, first: int, end: int) -> None:
        began = time.monotonic()
        plan = self._model.piece(self._tokens, range(first, end))
        for emission in plan.emissions:
            sleep_until(began + emission.at)
            self._emit(emission)
        sleep_until(began + plan.seconds)

    def _end(self) -> None:
        self._computed()


class _AnswerRun(PromptAndAnswer):
    """A PrefillRun of a prompt and its answer."""

    def __init__(
        self,
        model: SimulatedModel,
        prompt: _PromptRun,
        context: int,
        answer: Iterator[Token],
        emit: Callable[[Token], None],
        *,
        done: bool,
    ) -> None:
        super().__init__(prompt, emit)
        self._model = model
        self._context = context
        self._answer = answer
        self._done = done

    @property
    def done(self) -> bool:
        return self._done

    def _next(self) -> Token:
        began = time.monotonic()
        sleep_until(began + step(self._model.device, self._model.shape, self._context, self._model.options.dtype))
        self._context += 1
        token = next(self._answer)
        self._done = token.finish is not None
        return token


class _Noise:
    """Blocks of random bytes: consecutive slices of one large buffer, starting over at its end."""

    def __init__(self, layout: Layout, chunk_tokens: int) -> None:
        self._layout = layout
        largest = max(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layout.layers)
        states = (state.nbytes for layer in layout.layers for state in layer.states)
        size = max(NOISE_BYTES, chunk_tokens * largest * layout.itemsize, *states)
        self._buffer = memoryview(numpy.random.default_rng(0).bytes(size))
        self._next = 0

    def block(self, emission: Emission, wire: WireForm) -> KVBlock:
        layer = self._layout.layers[emission.layer]
        keys, values = (self._views(emission, layer.kv_heads, dim, wire) for dim in (layer.key_dim, layer.value_dim))
        return KVBlock(emission.layer, emission.start, emission.end, keys, values)

    def states(self, layer: int) -> StateBlock:
        return StateBlock(layer, [self._heads(1, state.nbytes)[0] for state in self._layout.layers[layer].states])

    def _views(self, emission: Emission, heads: int, dim: int, wire: WireForm) -> list[memoryview]:
        rows = emission.end - emission.start
        sizes = plane_bytes(dim, self._layout.itemsize, wire)
        return [view for size in sizes for view in self._heads(heads, rows * size)]

    def _heads(self, heads: int, size: int) -> list[memoryview]:
        if self._next + heads * size > len(self._buffer):
            self._next = 0
        first, self._next = self._next, self._next + heads * size
        return [self._buffer[first + head * size : first + (head + 1) * size] for head in range(heads)]
