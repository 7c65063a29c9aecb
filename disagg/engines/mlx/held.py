"""KV of finished requests in mlx arrays. The engine's thread makes and reads the arrays; any thread may look up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from disagg.engines.model.held import Held, HeldStore, Prefix

HeldArrays = Held["Rows", "Snapshot"]
HeldPrefix = Prefix["Rows", "Snapshot"]
Layer = tuple[Any, ...]  # (keys, values), [1, kv_heads, rows, dim], or the arrays of a state


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of consecutive tokens. layers: per layer, None for those that do not keep every row."""

    layers: tuple[Layer | None, ...]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.layers)

    def split(self, at: int) -> tuple[Rows, Rows]:
        """See model.held.tree.Rows. Copied layer by layer, so that only one layer exists twice."""
        upper, lower = [], []
        for layer in self.layers:
            halves = _copies(layer, 0, at), _copies(layer, at, None)
            mx.eval([array for half in halves for array in half or ()])
            upper.append(halves[0])
            lower.append(halves[1])
        return Rows(tuple(upper)), Rows(tuple(lower))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What sliding and state layers hold after some token. layers: per layer, None for those that keep every row.
    usable_from: see model.held.tree.Snapshot."""

    layers: tuple[Layer | None, ...]
    usable_from: int

    @property
    def nbytes(self) -> int:
        return _nbytes(self.layers)


def make_store(model: Any, limit: int) -> HeldStore[Rows, Snapshot]:
    """A store for the caches of `model`, of at most `limit` bytes; it holds nothing if mlx-lm's cache for some layer
    cannot be held."""
    windows: set[int] = set()
    for cache in make_prompt_cache(model):
        if isinstance(cache, RotatingKVCache) and cache.keep == 0:
            windows.add(cache.max_size)
        elif isinstance(cache, ArraysCache):
            windows.add(0)
        elif not isinstance(cache, KVCache):
            return HeldStore(0, None)
    return HeldStore(limit, min(windows, default=None))


def hold(
    store: HeldStore[Rows, Snapshot],
    tokens: Sequence[int],
    caches: Sequence[Any],
    salt: str,
    snapshots: dict[int, Snapshot],
) -> None:
    """Hold the KV of these tokens. snapshots: those of earlier tokens; the one after the last is added."""
    if covers(caches, len(tokens)):
        if (last := snapshot(caches, len(tokens))) is not None:
            snapshots[len(tokens)] = last
        store.add(tokens, salt, lambda start, end: rows(caches, start, end), snapshots)


def snapshot(caches: Sequence[Any], tokens: int) -> Snapshot | None:
    """The sliding and state layers of one request's evaluated caches after `tokens` tokens, copied: the caches may be
    views of memory that is written over later. None if there are no such layers."""
    layers = tuple(_fixed(cache) for cache in caches)
    arrays = [array for layer in layers for array in layer or ()]
    mx.eval(arrays)
    return Snapshot(layers, tokens if any(_has_dropped(cache, tokens) for cache in caches) else 0) if arrays else None


def rows(caches: Sequence[Any], start: int, end: int) -> Rows:
    """Rows [start, end) of the layers that keep every row, copied layer by layer."""
    layers = []
    for cache in caches:
        layers.append(_copies((cache.keys, cache.values), start, end) if isinstance(cache, KVCache) else None)
        mx.eval(layers[-1] or ())
    return Rows(tuple(layers))


def covers(caches: Sequence[Any], tokens: int) -> bool:
    """Whether caches that mlx-lm has taken out of a batch hold what a request needs to go on after `tokens` tokens."""
    return all(isinstance(cache, ArraysCache) or _has_rows(cache, tokens) for cache in caches)


def _has_rows(cache: Any, tokens: int) -> bool:
    if not isinstance(cache, KVCache | RotatingKVCache) or cache.keys is None:
        return False
    return bool(cache.offset == tokens and cache.keys.shape[2] >= cache.size())


def segments(prefix: HeldPrefix, layer: int) -> Iterator[Layer]:
    """The rows of one layer that keeps every row, in order, cut off after `prefix.tokens`."""
    left = prefix.tokens
    for part in prefix.rows:
        pair = part.layers[layer]
        assert pair is not None, "this layer does not keep every row"
        yield tuple(array[..., :left, :] for array in pair) if pair[0].shape[2] > left else pair
        left -= pair[0].shape[2]


def last_rows(prefix: HeldPrefix, layer: int) -> Layer:
    """The rows that a sliding layer keeps after `prefix.tokens`, in temporal order; a state's arrays."""
    pair = prefix.snapshot.layers[layer] if prefix.snapshot is not None else None
    assert pair is not None, "this layer keeps every row"
    surplus = prefix.snapshot_at - prefix.tokens
    return tuple(array[..., : array.shape[2] - surplus, :] for array in pair) if surplus else pair


def _has_dropped(cache: Any, tokens: int) -> bool:
    """Whether a cache after `tokens` tokens does not hold what it held after each of them."""
    return isinstance(cache, ArraysCache) or (isinstance(cache, RotatingKVCache) and tokens > cache.max_size)


def _fixed(cache: Any) -> Layer | None:
    if isinstance(cache, ArraysCache):
        return tuple(mx.concatenate([array[:0], array]) for array in cache.cache)
    if isinstance(cache, RotatingKVCache):
        first = cache.keys.shape[2] - cache.size()
        return _copies((cache.keys, cache.values), first, None)
    return None


def _copies(layer: Layer | None, start: int, end: int | None) -> Layer | None:
    """Rows [start, end) in memory of their own. mx.contiguous would return a view if it left out little."""
    if layer is None:
        return None
    return tuple(mx.concatenate([array[..., :0, :], array[..., start:end, :]], axis=2) for array in layer)


def _nbytes(layers: Sequence[Layer | None]) -> int:
    return sum(int(array.nbytes) for layer in layers for array in layer or ())
