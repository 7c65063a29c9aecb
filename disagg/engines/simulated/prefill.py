"""A prefill engine without a model: it emits random KV and hidden states of full size and layout at the predicted
times."""

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
from disagg.engines.model.bans import bans
from disagg.engines.model.prefix_cache import salted
from disagg.engines.simulated import model as simulated_model
from disagg.engines.simulated.model import END, CountedKV, SimulatedModel, sleep_until
from disagg.kv.blocks import Block, ChunkEnd, HiddenBlock, KVBlock, StateBlock
from disagg.planning.times import Emission, step

FINITE = 0xBFFF  # of 16 bits: clears an exponent's highest bit, so that no number is infinite, or none
NOISE_BYTES = 64 << 20  # larger than a CPU's caches: sending must read memory, as with real KV


class SimulatedPrefillEngine(EmittingEngine):
    """A EmittingEngine. hardware: the simulated machine. source: see simulated_model.load."""

    def __init__(self, source: str | Path, context: int, options: EngineOptions, hardware: str) -> None:
        self._model = simulated_model.load(source, context, options, hardware)
        self.info, self.tokenizer = self._model.info, self._model.tokenizer
        self._noise = _Noise(self.info.layout, self.info.split.hidden, options.chunk_tokens)
        self._held = CountedKV(self.info, options.max_held_bytes)

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
        self.require_layers(layers)
        split, layout = self.info.split, self.info.layout
        head = layers if layers is not None and layers < split.layers else None
        computed = range(len(tokens) and (layers or split.layers))
        known = tokens if head is None else tokens[:start]  # no hidden states are held
        held = self._held.find(known, salted(salt, head))

        def send(emission: Emission) -> None:
            self.on_beat()
            if emission.end > start:
                emit(self._noise.block(replace(emission, start=max(start, emission.start)), wire))

        def end_chunk(first: int, end: int) -> None:
            """Of tokens [first, end), the last of which are computed."""
            if end == len(tokens):
                for layer in computed:
                    if layout.layers[layer].states:
                        emit(self._noise.states(layer))
                self._held.hold(tokens, (), salted(salt, head), head)
            first = max(first, start)
            if layers is not None and first < end:
                if head is not None:
                    emit(self._noise.hidden(first, end))
                emit(ChunkEnd(first, end))

        if held:  # one chunk, without hidden states: of a head, no more is held than the receiver has
            for layer in computed:
                rows = layout.layers[layer].rows(len(tokens) if layers is None else held)
                if rows := rows[: max(0, held - rows.start)]:
                    send(Emission(layer, rows.start, rows.stop, 0.0))
            end_chunk(0, held)
        chunk = chunk_tokens or self._model.options.chunk_tokens
        return _PromptRun(self._model, len(tokens), send, held, chunk, end_chunk=end_chunk, layers=layers)

    def start_answer(self, request: AnswerRequest, emit: Callable[[Token], None]) -> _AnswerRun:
        self.require_layers()
        tokens, sampling, answered = request.tokens, request.sampling, request.answered
        held, chunk = self._held.find(tokens[:-1], salted(request.salt, None)), self._model.options.chunk_tokens
        prompt = _PromptRun(self._model, len(tokens) - 1, lambda emission: self.on_beat(), held, chunk)
        prompt_tokens = len(tokens) - answered
        banned = bans(sampling, (END,), request.bad_words, tokens[prompt_tokens:])
        answer = self._model.answer(tokens[:prompt_tokens], sampling, answered, request.constraint, banned)
        return _AnswerRun(self._model, prompt, len(tokens), answer, emit, done=answered >= sampling.max_tokens)

    @property
    def held_bytes(self) -> int:
        return self._held.store.nbytes

    def logits(self, tokens: Sequence[int], last: int, *, chunk_tokens: int | None = None) -> Logits:
        """Raises ModelError: there are none."""
        raise simulated_model.no_logits()


def _ignore(first: int, end: int) -> None:
    pass


class _PromptRun(PromptRun):
    """A PromptRun that sleeps as long as each step is predicted to take. end_chunk: called with the tokens of each
    step. layers: the model's first so many are computed, of chunks that can be used one by one; None: all."""

    def __init__(
        self,
        model: SimulatedModel,
        tokens: int,
        emit: Callable[[Emission], None],
        held: int,
        chunk_tokens: int,
        *,
        end_chunk: Callable[[int, int], None] = _ignore,
        layers: int | None = None,
    ) -> None:
        super().__init__(tokens, held, chunk_tokens)
        self._model, self._emit, self._end_chunk = model, emit, end_chunk
        self._layers = layers

    def _compute(self, first: int, end: int) -> None:
        began = time.monotonic()
        whole = self._layers is None
        layers = None if self._layers is None else range(self._layers)
        plan = self._model.piece(self._tokens if whole else end, range(first, end), layers)
        for emission in plan.emissions:
            sleep_until(began + emission.at)
            self._emit(emission)
        sleep_until(began + plan.seconds)
        self._end_chunk(first, end)


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
    """Blocks of random bytes: consecutive slices of one large buffer, starting over at its end. hidden: elements of a
    hidden state."""

    def __init__(self, layout: Layout, hidden: int, chunk_tokens: int) -> None:
        self._layout, self._hidden_bytes = layout, hidden * layout.itemsize
        largest = max(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layout.layers) * layout.itemsize
        states = (state.nbytes for layer in layout.layers for state in layer.states)
        size = max(NOISE_BYTES, chunk_tokens * max(largest, self._hidden_bytes), *states)
        noise = numpy.frombuffer(numpy.random.default_rng(0).bytes(size + size % 2), numpy.uint16)
        self._buffer = memoryview((noise & FINITE).tobytes())
        self._next = 0

    def block(self, emission: Emission, wire: WireForm) -> KVBlock:
        layer = self._layout.layers[emission.layer]
        keys, values = (self._views(emission, layer.kv_heads, dim, wire) for dim in (layer.key_dim, layer.value_dim))
        return KVBlock(emission.layer, emission.start, emission.end, keys, values)

    def hidden(self, start: int, end: int) -> HiddenBlock:
        return HiddenBlock(start, end, self._heads(1, (end - start) * self._hidden_bytes)[0])

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
