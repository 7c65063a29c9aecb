"""mlx-lm's caches, which are one for each layer of the model, as those of the layout's layers, and their parts.

A layer of the model that keeps the keys of an indexer beside its rows is two layers of the layout, and has a CacheList
of two KVCaches. A layer that has rows and a state is one, with a CacheList of an ArraysCache and a KVCache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache


def entries_of(caches: Iterable[Any]) -> list[Any]:
    """One cache for each layer of the layout, of caches of either kind."""
    return [entry for cache in caches for entry in (cache.caches if _is_indexed(cache) else (cache,))]


def as_layers(caches: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
    """These entries as caches of the model's layers, like `caches`."""
    rest = iter(entries)
    return [CacheList(*(next(rest) for _ in cache.caches)) if _is_indexed(cache) else next(rest) for cache in caches]


def parts_of(entry: Any) -> tuple[Any, ...]:
    """The caches of one layer of the layout: two if it has a state and rows."""
    parts = tuple(entry.caches) if isinstance(entry, CacheList) else ()
    both = len(parts) == 2 and isinstance(parts[0], ArraysCache) and isinstance(parts[1], KVCache)
    return parts if both else (entry,)


def _is_indexed(cache: Any) -> bool:
    parts = cache.caches if isinstance(cache, CacheList) else ()
    return len(parts) == 2 and all(isinstance(part, KVCache) for part in parts)
