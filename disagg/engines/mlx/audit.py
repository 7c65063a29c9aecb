"""Audit of received KV: computes some of it again, and states how much it differs from what arrived.

The AuditPlan states what: passes of tokens through all layers, and of the first layer a sample of rows, or the last
inputs of its convolution.

The tokens run over stand-ins of the request's caches, which give the model the rows that arrived, also those of the
tokens that run, and put aside what it computes. So no row that is computed here is used by the request, and its caches
are not touched: what follows is the same, bit for bit, with an audit and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf, isnan
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from disagg.engines.base.audit import MEASURES, AuditFinding, AuditPass, AuditPlan, Deviation, Measure
from disagg.engines.mlx.cache import as_layers, entries_of, fill_from_held, parts_of
from disagg.engines.mlx.prefix_cache import CachedPrefix

_LEAST = 1e-12  # of a size that is divided by

Pair = tuple[Any, Any]  # received, computed


class _Found(NamedTuple):
    """A deviation that is not evaluated yet."""

    measure: Measure
    value: Any
    layer: int


def audit(
    model: Any, caches: Sequence[Any], tokens: Sequence[int], plan: AuditPlan, held: CachedPrefix | None = None
) -> AuditFinding:
    """caches: built for all of `tokens`, of which the first are those of `held`. Runs on the model's thread."""
    caches = entries_of(caches)
    found = [one for part in plan.passes for one in _pass(model, caches, tokens, part, held)]
    if plan.sample:
        found += [_Found("sample", mx.max(_by_row(*pair)), 0) for pair in _sample(model, caches, tokens, plan.sample)]
    if plan.inputs:
        found += [_Found("sample", _whole(*pair), 0) for pair in _inputs(model, caches[0], tokens[-plan.inputs :])]
    mx.eval([one.value for one in found])
    deviations = [Deviation(one.measure, _number(one.value), one.layer) for one in found]
    by_measure = ([one for one in deviations if one.measure == measure] for measure in MEASURES)
    return AuditFinding(plan.tokens, tuple(max(some, key=_value) for some in by_measure if some))


def _value(deviation: Deviation) -> float:
    return deviation.value


def _number(value: Any) -> float:
    """NaN is worse than any deviation."""
    number = float(value)
    return inf if isnan(number) else number


def _pass(
    model: Any, caches: Sequence[Any], tokens: Sequence[int], part: AuditPass, held: CachedPrefix | None
) -> Iterator[_Found]:
    """Run the tokens of one pass through all layers."""
    layers = make_prompt_cache(model)
    stand_ins = [
        _stand_in(cache, empty, part, len(tokens), partial(fill_from_held, held=held, index=index) if held else None)
        for index, (cache, empty) in enumerate(zip(caches, entries_of(layers), strict=True))
    ]
    model(mx.array([list(tokens[part.begin : part.end])]), cache=as_layers(layers, stand_ins))
    for index, (cache, stand_in, rows) in enumerate(zip(caches, stand_ins, part.rows, strict=True)):
        for one, other in zip(parts_of(cache), parts_of(stand_in), strict=True):
            if isinstance(one, ArraysCache):
                pairs = zip(one.cache, other.cache, strict=True) if part.states else ()
                yield from (_Found(part.measure, _whole(*pair), index) for pair in pairs)
            elif rows:
                received = _rows(one, rows, len(tokens))
                computed = (array[..., rows.start - part.begin :, :] for array in other.computed)
                pairs = zip(received, computed, strict=True)
                yield from (_Found(part.measure, mx.median(_by_row(*pair)), index) for pair in pairs if pair[0].size)


def _stand_in(cache: Any, empty: Any, part: AuditPass, total: int, fill: Callable[[Any], None] | None) -> Any:
    """A cache for one layer of the layout in a pass. empty: the model's own, new. fill: puts into it what was held."""
    if isinstance(cache, CacheList):
        pairs = zip(cache.caches, empty.caches, strict=True)
        return CacheList(*(_stand_in(one, other, part, total, fill) for one, other in pairs))
    if isinstance(cache, KVCache) or (isinstance(cache, RotatingKVCache) and not part.on_held):
        return _Arrived(cache, part, total)
    stand_in = _Sliding(empty.max_size, empty.keep) if isinstance(cache, RotatingKVCache) else empty
    if fill is not None:
        fill(stand_in)
    return stand_in


def _rows(cache: Any, rows: range, total: int) -> Pair:
    """The rows of these tokens, keys and values, from a cache of `total` tokens."""
    gone = total - cache.keys.shape[2]
    keys, values = (array[..., rows.start - gone : rows.stop - gone, :] for array in (cache.keys, cache.values))
    return keys, values


class _Arrived(KVCache):
    """Gives the rows that arrived, up to the end of a pass. computed: those that the model computes."""

    computed: Pair

    def __init__(self, cache: Any, part: AuditPass, total: int) -> None:
        super().__init__()
        self._sliding = isinstance(cache, RotatingKVCache)
        gone = total - cache.keys.shape[2]
        self.keys, self.values = _rows(cache, range(gone, part.end), total)
        self.offset = part.begin

    def update_and_fetch(self, keys: Any, values: Any) -> Pair:
        self.computed = keys, values
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> Pair:
        """Rows of tokens before the pass and in it."""
        return self.keys, self.values

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        # Of a sliding layer every row that is here is in the window of every token that runs: see `plan`.
        return super().make_mask(N, window_size=None if self._sliding else window_size, return_array=return_array)


class _Sliding(RotatingKVCache):
    """mlx-lm's own, for tokens whose rows did not arrive. computed: the rows of the pass."""

    computed: Pair

    def update_and_fetch(self, keys: Any, values: Any) -> Pair:
        self.computed = keys, values
        both: Pair = super().update_and_fetch(keys, values)
        return both


class _Enough(Exception):
    """The first layer has its rows: nothing after it needs to be computed."""


class _Sample(KVCache):
    """The first layer's cache in a batch of single tokens, each at its own place in the prompt. offset: the places."""

    computed: Pair

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__()
        self.offset = mx.array(list(places))

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> Pair:
        self.computed = keys, values
        raise _Enough


def _sample(model: Any, caches: Sequence[Any], tokens: Sequence[int], places: Sequence[int]) -> Iterator[Pair]:
    """The first layer's rows of these tokens, received and computed."""
    layers = make_prompt_cache(model)
    stand_ins, sample = entries_of(layers), _Sample(places)
    parts = [part if isinstance(part, ArraysCache) else sample for part in parts_of(stand_ins[0])]
    stand_ins[0] = CacheList(*parts) if isinstance(stand_ins[0], CacheList) else sample
    with suppress(_Enough):
        model(mx.array([[tokens[place]] for place in places]), cache=as_layers(layers, stand_ins))
    (cache,) = (part for part in parts_of(caches[0]) if not isinstance(part, ArraysCache))
    rows = mx.array(list(places)) - (len(tokens) - cache.keys.shape[2])
    received = (mx.take(array, rows, axis=2) for array in (cache.keys, cache.values))
    computed = (array.transpose(2, 1, 0, 3) for array in sample.computed)
    return ((one, other) for one, other in zip(received, computed, strict=True) if one.size)


def _inputs(model: Any, cache: Any, tokens: Sequence[int]) -> Iterator[Pair]:
    """The last inputs of the first layer's convolutions, received and computed from these tokens alone."""
    stand_ins = make_prompt_cache(model)
    model(mx.array([list(tokens)]), cache=stand_ins)
    one, other = (next(p.cache for p in parts_of(c) if isinstance(p, ArraysCache)) for c in (cache, stand_ins[0]))
    # [1, inputs, channels], first. A recurrent state has a dimension more, or as many rows as channels, and depends on
    # all tokens.
    windows = ((a, b) for a, b in zip(one, other, strict=True) if a.ndim == 3 and a.shape[1] == one[0].shape[1])
    return ((a[:, -len(tokens) :], b[:, -len(tokens) :]) for a, b in windows)


def _by_row(received: Any, computed: Any) -> Any:
    """The deviation of each row, all heads together: [1, heads, rows, dim] -> [rows]. The size is at least that of an
    ordinary row, so that rounding in a small one is not much."""
    size = _size(computed, (0, 1, 3))
    return _size(_difference(received, computed), (0, 1, 3)) / mx.maximum(mx.maximum(size, mx.median(size)), _LEAST)


def _whole(received: Any, computed: Any) -> Any:
    return _size(_difference(received, computed), None) / mx.maximum(_size(computed, None), _LEAST)


def _difference(received: Any, computed: Any) -> Any:
    return received.astype(mx.float32) - computed.astype(mx.float32)


def _size(array: Any, axes: tuple[int, ...] | None) -> Any:
    """Root mean square."""
    return mx.sqrt(mx.mean(mx.square(array.astype(mx.float32)), axis=axes))
