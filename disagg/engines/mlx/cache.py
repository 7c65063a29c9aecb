"""mlx-lm caches over received and held KV.

Received KV is not copied: an mlx array exposes its bytes to Python, KV is received straight into them, and a cache is a
view of them. Only KV that was quantised on the wire is dequantised, and rows that follow held ones are joined to them,
into memory of its own. The first step of a request copies its caches into the running batch; after that the memory is
free.

mlx-lm has one cache for each layer of the model. A layer that keeps the keys of an indexer beside its rows is two
layers of the layout, and has a CacheList of two KVCaches; one that has rows and a state is one, with a CacheList of an
ArraysCache and a KVCache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from disagg.api.layout import BITS, GROUP, LayerLayout
from disagg.engines.model.prefix_cache import Layer, Prefix, last_rows, segments
from disagg.errors import LayoutMismatch
from disagg.kv.received import ALIGNMENT, ReceivedKV, Rows


def build(
    model: Any,
    kv: ReceivedKV | None,
    held: Prefix[Any, Any] | None = None,
    *,
    tail: Sequence[Any] = (),
) -> list[Any]:
    """One evaluated mlx-lm cache per layer, as if the model had computed the tokens of `held` and `kv` itself.

    kv begins where `held` ends. tail: the caches of the last layers, which are not in `kv`, after as many tokens.
    The caches are views of the arena, which must come from `memory.allocate` and stay unchanged while they are in
    use, and of the held arrays. KV that was quantised on the wire is dequantised to the layout's dtype. Without
    tokens, the model's empty caches are returned. LayoutMismatch if a layer does not fit the model."""
    empty: list[Any] = make_prompt_cache(model)
    caches = entries_of(empty)
    if kv is not None and len(caches) != len(kv.layout.layers) + len(tail):
        raise LayoutMismatch(f"the KV has {len(kv.layout.layers)} layers, the model {len(caches) - len(tail)}")
    tokens = kv.tokens if kv is not None else held.tokens if held is not None else 0
    if tokens == 0:
        return empty
    if kv is not None and kv.tokens == kv.start:
        kv = None
    if kv is not None and kv.arena is None:
        raise LayoutMismatch("the KV was released before its caches were built")
    if tail:
        caches[-len(tail) :] = tail
    for index, cache in enumerate(caches[: len(caches) - len(tail)]):
        for part in parts_of(cache):
            received = _received(kv, index, part) if kv is not None else None
            _fill(part, _held(held, index, part) if held is not None else [], received, index=index, tokens=tokens)
    mx.eval([cache.state for cache in caches])
    return as_layers(empty, caches)


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


def fill_from_held(cache: Any, held: Prefix[Any, Any], index: int) -> None:
    """Set an empty cache of the layout's layer `index`, or of a part of it, to what it contains after the held
    tokens."""
    _fill(cache, _held(held, index, cache), None, index=index, tokens=held.tokens)


def _held(held: Prefix[Any, Any], index: int, cache: Any) -> list[Layer]:
    """What is held of one layer, in order."""
    return [rows for _, rows in segments(held, index)] if isinstance(cache, KVCache) else [last_rows(held, index)]


def exact(cache: Any) -> Any:
    """The same rows in a cache without room for more: all, or the last ones of a sliding layer in temporal order."""
    for part in parts_of(cache):
        if isinstance(part, RotatingKVCache):
            needed = part.size()
            ordered = (part._temporal_order(array) for array in (part.keys, part.values))
            rows = (array[..., array.shape[2] - needed :, :] for array in ordered)
            part.state = (*rows, part.offset, part.keep, part.max_size, needed)
        elif isinstance(part, KVCache):
            part.state = (*part.keys_and_values(), part.offset)
    return cache


def _received(kv: ReceivedKV, index: int, cache: Any) -> Layer:
    """What was received of one layer: keys and values, or the arrays of its state."""
    layout = kv.layout.layers[index]
    assert kv.arena is not None, "checked by the caller"
    if isinstance(cache, ArraysCache):
        states = zip(kv.ranges.states[index], layout.states, strict=True)
        return tuple(_array(kv.arena.memory, place, (1, *state.shape), state.dtype) for place, state in states)
    pieces = [_keys_and_values(rows, layout, kv.layout.dtype) for rows in kv.rows(index)]
    return tuple(_joined(list(arrays)) for arrays in zip(*pieces, strict=True))


def _keys_and_values(rows: Rows, layout: LayerLayout, dtype: str) -> tuple[Any, Any]:
    stored, wanted = rows.stored, rows.wanted
    keys = _tensor(rows.memory, rows.keys, (1, layout.kv_heads, len(stored), layout.key_dim), dtype)
    values = _tensor(rows.memory, rows.values, (1, layout.kv_heads, len(stored), layout.value_dim), dtype)
    if wanted == stored:
        return keys, values
    some = slice(wanted.start - stored.start, wanted.stop - stored.start)
    return keys[..., some, :], values[..., some, :]


def _tensor(whole: Any, planes: tuple[slice, ...], shape: tuple[int, ...], dtype: str) -> Any:
    """Keys or values from their planes: one if as-is, three if quantised."""
    if len(planes) == 1:
        return _array(whole, planes[0], shape, dtype)
    *outer, dim = shape
    packed = _array(whole, planes[0], (*outer, dim * BITS // 32), "uint32")
    scales, biases = (_array(whole, place, (*outer, dim // GROUP), dtype) for place in planes[1:])
    return mx.dequantize(packed, scales, biases, group_size=GROUP, bits=BITS)


def _fill(cache: Any, held: list[Layer], received: Layer | None, *, index: int, tokens: int) -> None:
    """Set one layer's cache to what it contains after `tokens` tokens."""
    parts = [*held, received] if received is not None else held
    if isinstance(cache, ArraysCache):
        cache.cache = list(parts[-1])  # a state replaces the one before it
        return
    keys, values = (_joined(list(arrays)) for arrays in zip(*parts, strict=True))
    needed = min(tokens, cache.max_size) if isinstance(cache, RotatingKVCache) else tokens
    surplus = keys.shape[2] - needed if held else 0
    if keys.shape[2] - max(0, surplus) != needed:
        raise LayoutMismatch(
            f"layer {index}: the KV has {keys.shape[2]} of {tokens} tokens, "
            f"mlx-lm's {type(cache).__name__} needs {needed}"
        )
    if isinstance(cache, RotatingKVCache):
        # In temporal order and filled up to `needed`: the next token is written at index `needed`, or wraps around.
        keys, values = keys[..., surplus:, :], values[..., surplus:, :]
        cache.state = (keys, values, tokens, cache.keep, cache.max_size, needed)
    elif isinstance(cache, KVCache) and not surplus:
        cache.state = (keys, values, tokens)
    else:
        raise LayoutMismatch(f"layer {index}: a {type(cache).__name__} cannot be filled from received KV")


def _joined(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=2)


def _array(whole: Any, place: slice, shape: tuple[int, ...], dtype: str) -> Any:
    rows = whole[place.start // ALIGNMENT : -(-place.stop // ALIGNMENT)]
    return rows.view(getattr(mx, dtype)).reshape(-1)[: math.prod(shape)].reshape(shape)
