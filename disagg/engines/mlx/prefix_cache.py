"""What of mlx-lm's caches a PrefixCache holds: rows and snapshots. The engine's thread makes and reads the arrays; any
thread may look up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from disagg.engines.mlx.cache import entries_of
from disagg.engines.model.prefix_cache import Layer, LayerArrays, LayerSnapshot, PinnedPrefix, Prefix, PrefixCache

PinnedArrays = PinnedPrefix["Rows", LayerSnapshot]
CachedPrefix = Prefix["Rows", LayerSnapshot]


@dataclass(frozen=True, slots=True, eq=False)
class Rows(LayerArrays):
    """Rows of consecutive tokens. layers: None for those that do not keep every row."""

    def split(self, at: int) -> tuple[Rows, Rows]:
        """Copied layer by layer, so that only one layer exists twice."""
        upper, lower = [], []
        for layer in self.layers:
            halves = copies(layer, 0, at), copies(layer, at, None)
            mx.eval([array for half in halves for array in half or ()])
            upper.append(halves[0])
            lower.append(halves[1])
        return Rows(tuple(upper)), Rows(tuple(lower))


def make_prefix_cache(model: Any, limit: int) -> PrefixCache[Rows, LayerSnapshot]:
    """A store for the caches of `model`, of at most `limit` bytes. It holds nothing if mlx-lm's cache for some layer
    cannot be held."""
    windows: set[int] = set()
    for cache in entries_of(make_prompt_cache(model)):
        if isinstance(cache, RotatingKVCache) and cache.keep == 0:
            windows.add(cache.max_size)
        elif isinstance(cache, ArraysCache):
            windows.add(0)
        elif not isinstance(cache, KVCache):
            return PrefixCache(0, None)
    return PrefixCache(limit, min(windows, default=None))


def hold(
    store: PrefixCache[Rows, LayerSnapshot],
    tokens: Sequence[int],
    caches: Sequence[Any],
    salt: str,
    snapshots: dict[int, LayerSnapshot],
) -> None:
    """Hold the KV of these tokens. snapshots: those of earlier tokens; the one after the last is added."""
    if covers(caches, len(tokens)):
        if (last := snapshot(caches, len(tokens))) is not None:
            snapshots[len(tokens)] = last
        store.add(tokens, salt, lambda start, end: rows(caches, start, end), snapshots)


def snapshot(caches: Sequence[Any], tokens: int) -> LayerSnapshot | None:
    """The sliding and state layers of one request's evaluated caches after `tokens` tokens. They are copied: the caches
    may be views of memory that is written over later. None if there are no such layers."""
    layers = tuple(_fixed(cache) for cache in entries_of(caches))
    arrays = [array for layer in layers for array in layer or ()]
    mx.eval(arrays)
    if not arrays:
        return None
    dropped = any(_has_dropped(cache, tokens) for cache in caches)
    return LayerSnapshot(layers, usable_from=tokens if dropped else 0)


def rows(caches: Sequence[Any], start: int, end: int) -> Rows:
    """Rows [start, end) of the layers that keep every row, copied layer by layer."""
    layers = []
    for cache in entries_of(caches):
        layers.append(copies((cache.keys, cache.values), start, end) if isinstance(cache, KVCache) else None)
        mx.eval(layers[-1] or ())
    return Rows(tuple(layers))


def covers(caches: Sequence[Any], tokens: int) -> bool:
    """Whether caches that mlx-lm has taken out of a batch hold what a request needs to go on after `tokens` tokens."""
    return all(isinstance(cache, ArraysCache) or _has_rows(cache, tokens) for cache in entries_of(caches))


def _has_rows(cache: Any, tokens: int) -> bool:
    if not isinstance(cache, KVCache | RotatingKVCache) or cache.keys is None:
        return False
    return bool(cache.offset == tokens and cache.keys.shape[2] >= cache.size())


def _has_dropped(cache: Any, tokens: int) -> bool:
    """Whether a cache after `tokens` tokens does not hold what it held after each of them."""
    return isinstance(cache, ArraysCache) or (isinstance(cache, RotatingKVCache) and tokens > cache.max_size)


def _fixed(cache: Any) -> Layer | None:
    """Copies of a state's arrays, or of a sliding layer's rows; None for a layer that keeps every row."""
    if isinstance(cache, ArraysCache):
        return tuple(mx.concatenate([array[:0], array]) for array in cache.cache)
    if isinstance(cache, RotatingKVCache):
        first = cache.keys.shape[2] - cache.size()
        return copies((cache.keys, cache.values), first, None)
    return None


def copies(layer: Layer | None, start: int, end: int | None) -> Layer | None:
    """Rows [start, end) in memory of their own. mx.contiguous would return a view if it left out little."""
    if layer is None:
        return None
    return tuple(mx.concatenate([array[..., :0, :], array[..., start:end, :]], axis=2) for array in layer)
