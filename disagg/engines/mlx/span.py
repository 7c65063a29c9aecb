"""Some layers of a model, computed without the others: the head of a split, or its tail.

A span is a copy of the model that shares its modules. The layers before it are replaced by ones that pass on the hidden
state that was computed elsewhere, those after it by ones that do nothing. The model's own `__call__` runs, so that
masks, positions and what else it makes of token ids and caches are as always. Masks are made from caches, also from
those of layers that are not in the span: these have stand-ins, which count tokens and have no rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from disagg.api.layout import Layout, SplitLayout
from disagg.engines.decoding import Job
from disagg.engines.decoding.tail import Tail
from disagg.engines.mlx.cache import as_layers, entries_of, exact, fill_from_held, parts_of
from disagg.engines.mlx.prefix_cache import CachedPrefix
from disagg.engines.model.reference import EngineInfo
from disagg.errors import ModelError
from disagg.kv.arriving import ArrivingKV, Chunk

_TEST_CHUNKS = (13, 7)
_ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Of the largest element, for a span against the whole model. The same kernels run, so that no bit differs on a CPU."""


class Spans:
    """The spans of a model, made when they are asked for. split: how it can be divided, with a refusal if a test of a
    head and a tail does not give what the whole model gives. Without all layers there is no test: that of the decode
    host counts."""

    def __init__(self, model: Any, info: EngineInfo) -> None:
        self._model, self._made = model, dict[tuple[int, int], Span]()
        self.split = split = info.split
        dtype = info.layout.dtype
        if not split.refusal and split.layers > 1 and info.loaded is None:
            self.split = replace(split, refusal=self._test(_ROUNDING[dtype]))

    def __call__(self, begin: int, end: int) -> Span:
        if (begin, end) not in self._made:
            self._made[begin, end] = Span(self._model, self.split, begin, end)
        return self._made[begin, end]

    def _test(self, rounding: float) -> str:
        """Compare heads and tails with the whole model: why it cannot be divided, empty if it can."""
        try:
            whole = make_prompt_cache(self._model)
            for tokens in _test_tokens():
                self._model(mx.array([tokens]), cache=whole)
            expected = [array for cache in entries_of(whole) for array in _arrays(cache)]
            for layers in sorted({1, self.split.layers // 2, self.split.layers - 1}):
                if not _alike(expected, self._divided(layers), rounding):
                    return f"divided after layer {layers}, mlx-lm computes it otherwise than whole"
        except Exception as error:  # noqa: BLE001 - which one depends on the architecture
            return f"mlx-lm cannot compute it in parts: {type(error).__name__}: {error}"
        return ""

    def _divided(self, layers: int) -> list[Any]:
        """What the caches of all layers contain after a head of so many layers, and a tail."""
        head, tail = self(0, layers), self(layers, self.split.layers)
        first, last = head.caches(), tail.caches()
        for tokens in _test_tokens():
            tail.run(tokens, last, head.run(tokens, first))
        return [array for cache in (*head.own(first), *tail.own(last)) for array in _arrays(cache)]


class Span:
    """Layers [begin, end) of `model`."""

    def __init__(self, model: Any, split: SplitLayout, begin: int, end: int) -> None:
        self._whole = model
        self._given: Any = None
        self._made: Any = None
        self._inside = [begin <= place < end for place in split.places]
        self._ends_early = end < split.layers
        layers: list[Any] = list(model.layers)
        if len(layers) != split.layers:
            raise ModelError(f"mlx-lm has {len(layers)} layers, the checkpoint {split.layers}")
        for index in range(begin):
            layers[index] = _Elsewhere(layers[index], self._pass_on if index == begin - 1 else None)
        for index in range(end, len(layers)):
            layers[index] = _Elsewhere(layers[index], None)
        if self._ends_early:
            layers[end - 1] = _Watched(layers[end - 1], self._keep)
        self._model = model if (begin, end) == (0, split.layers) else with_layers(model, layers)

    def caches(self, held: CachedPrefix | None = None, room: int = 0) -> list[Any]:
        """Caches for `run`, after the held tokens: the model's own for the layers of the span, stand-ins for the
        others. room: tokens that follow; rows of so many are allocated at once."""
        layers: list[Any] = make_prompt_cache(self._whole)
        caches = entries_of(layers)
        for index, inside in enumerate(self._inside):
            if not inside:
                caches[index] = _stand_in(caches[index], held.tokens if held is not None else 0)
                continue
            for part in parts_of(caches[index]):
                if held is not None:
                    fill_from_held(part, held, index)
                if room and isinstance(part, KVCache):
                    part.step = room
        return as_layers(layers, caches)

    def run(self, tokens: Sequence[int], caches: Sequence[Any], hidden: Any = None) -> Any:
        """Run the next tokens. hidden: [1, tokens, hidden], the state after the layer before the span; None: the span
        begins with the first layer. Returns the state after the last layer of the span, not evaluated, and None if that
        is the model's last one."""
        self._given, self._made = hidden, None
        try:
            self._model(mx.array([list(tokens)]), cache=list(caches))
            if self._ends_early and self._made.shape[:2] != (1, len(tokens)):
                raise ModelError(f"a layer passes on an array of shape {self._made.shape} for {len(tokens)} tokens")
            return self._made
        finally:
            self._given = self._made = None
            for cache, inside in zip(entries_of(caches), self._inside, strict=True):
                if not inside:
                    _advance(cache, len(tokens))

    def own(self, caches: Sequence[Any]) -> list[Any]:
        """Those of the caches whose layers are in the span, one for each layer of the layout."""
        return [cache for cache, inside in zip(entries_of(caches), self._inside, strict=True) if inside]

    def _pass_on(self, given: Any) -> Any:
        return given if self._given is None else self._given

    def _keep(self, made: Any) -> None:
        self._made = made


class MLXTail(Tail):
    """Runs the last layers of the model over mlx-lm's own caches, after what is held of them."""

    def __init__(self, job: Job, arriving: ArrivingKV, spans: Spans, layout: Layout) -> None:
        count = spans.split.layers
        first = count if arriving.layers is None else min(arriving.layers, count)
        super().__init__(arriving, count - first)
        self._tokens = job.request.tokens
        self._span: Span | None = spans(first, count) if self.layers else None
        self._caches: list[Any] = []
        here = Layout(layout.layers[spans.split.count(first) :], layout.dtype)
        self._nbytes = here.nbytes(arriving.tokens)
        if self._span is not None:
            held = job.held.read() if job.held is not None else None
            self._caches = self._span.caches(held, arriving.tokens - arriving.start)

    @property
    def caches(self) -> list[Any]:
        """Those of the layers that are computed here, after `covered` tokens."""
        return [exact(cache) for cache in self._own()]

    @property
    def nbytes(self) -> int:
        """Of the whole prompt: the first piece allocates so much."""
        return self._nbytes

    def _own(self) -> list[Any]:
        return self._span.own(self._caches) if self._span is not None else []

    def _compute(self, chunk: Chunk, begin: int, end: int) -> None:
        assert self._span is not None, "there are layers to compute"
        hidden = self._hidden(chunk)[:, begin - chunk.start : end - chunk.start]
        self._span.run(self._tokens[begin:end], self._caches, hidden)
        mx.eval([cache.state for cache in self._own()])

    def _hidden(self, chunk: Chunk) -> Any:
        """The hidden states of a chunk, [1, tokens, hidden]: a view of the memory into which they were received."""
        assert chunk.hidden is not None, "the transfer has hidden states"
        tokens, width = chunk.end - chunk.start, self.arriving.hidden
        dtype = getattr(mx, self.arriving.layout.dtype)
        states = chunk.hidden.memory.reshape(-1)[: tokens * width * dtype.size].view(dtype)
        return states.reshape(1, tokens, width)


def first_layers(model: Any, count: int) -> Any:
    """A copy of the model that computes its first so many layers: what comes after them is for nothing."""
    return with_layers(model, [*model.layers[:count], *(_Elsewhere(layer, None) for layer in model.layers[count:])])


def with_layers(model: Any, layers: list[Any]) -> Any:
    """A copy of the model that has these layers in place of its own, and shares everything else."""
    return _replaced(model, list(model.layers), layers) or _cannot_be_divided(model)


def _replaced(module: Any, old: list[Any], new: list[Any]) -> Any:
    """A copy of the module, whose list of layers may be its own or that of a module in it; None if it has none."""
    for name, child in module.items():
        if isinstance(child, list) and len(child) == len(old) and all(a is b for a, b in zip(child, old, strict=True)):
            other: Any = new
        elif isinstance(child, nn.Module) and (inner := _replaced(child, old, new)) is not None:
            other = inner
        else:
            continue
        copied = copy.copy(module)
        copied[name] = other
        return copied
    return None


def _cannot_be_divided(model: Any) -> Any:
    raise ModelError(f"{type(model).__name__} does not have its layers in one list")


class _Layer:
    """In place of a layer of the model, with its attributes."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class _Elsewhere(_Layer):
    """A layer that is computed elsewhere, or not at all: passes its input on. hand_on: changes it. gemma4's layers
    return their KV and its offset, too, for later ones to share."""

    def __init__(self, layer: Any, hand_on: Callable[[Any], Any] | None) -> None:
        super().__init__(layer)
        self._hand_on = hand_on

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        state = arguments[0] if arguments else options["inputs"]  # gptj names it
        made = state if self._hand_on is None else self._hand_on(state)
        return (made, None, None) if "shared_kv" in options else made


class _Watched(_Layer):
    """A layer whose output `keep` gets, too."""

    def __init__(self, layer: Any, keep: Callable[[Any], None]) -> None:
        super().__init__(layer)
        self._keep = keep

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        made = self._layer(*arguments, **options)
        self._keep(made[0] if isinstance(made, tuple) else made)
        return made


class _Counted(KVCache):
    """In place of a cache of a layer that is not computed here: its tokens, for masks and positions."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.offset = tokens

    @property
    def state(self) -> Any:
        return ()


class _CountedWindow(RotatingKVCache):
    """The same for a sliding layer. Its masks depend on nothing but the number of tokens, if more than one runs."""

    def __init__(self, like: Any, tokens: int) -> None:
        super().__init__(like.max_size, like.keep)
        self.offset = tokens

    @property
    def state(self) -> Any:
        return ()


def _stand_in(cache: Any, tokens: int) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*(_stand_in(part, tokens) for part in cache.caches))
    if isinstance(cache, RotatingKVCache):
        return _CountedWindow(cache, tokens)
    return cache if isinstance(cache, ArraysCache) else _Counted(tokens)


def _advance(cache: Any, tokens: int) -> None:
    """Count tokens in a stand-in."""
    for part in cache.caches if isinstance(cache, CacheList) else (cache,):
        if not isinstance(part, ArraysCache):
            part.offset += tokens


def _test_tokens() -> Iterator[list[int]]:
    """Two chunks: masks and positions of the second depend on the first."""
    begin = 0
    for length in _TEST_CHUNKS:
        yield list(range(begin, begin + length))
        begin += length


def _arrays(cache: Any) -> list[Any]:
    """What a cache contains: rows, or states."""
    return [
        array
        for part in parts_of(exact(cache))
        for array in (part.cache if isinstance(part, ArraysCache) else (part.keys, part.values))
    ]


def _alike(expected: Sequence[Any], found: Sequence[Any], rounding: float) -> bool:
    mx.eval(list(expected), list(found))
    return len(expected) == len(found) and all(
        a.shape == b.shape and (not a.size or float(_largest(a - b)) <= rounding * float(_largest(a)))
        for a, b in zip(expected, found, strict=True)
    )


def _largest(array: Any) -> Any:
    return mx.max(mx.abs(array.astype(mx.float32)))
