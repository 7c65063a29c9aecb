"""Received KV into mlx-lm's caches.

Bytes are wrapped, not converted: numpy reinterprets the buffer, mlx copies it once into its own memory. Must run on the
thread that runs the model, whose stream the arrays belong to.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from disagg.errors import LayoutMismatch
from disagg.kv.layout import LayerLayout
from disagg.kv.received import Buffer, ReceivedKV

# numpy has no bfloat16: its bits travel as uint16.
_NUMPY: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def build(model: Any, kv: ReceivedKV) -> list[Any]:
    """One evaluated mlx-lm cache per layer, as if the model had read `kv.tokens` tokens itself.

    With no tokens these are the model's fresh caches. Raises LayoutMismatch where a layer does not fit the model.
    """
    caches: list[Any] = make_prompt_cache(model)
    if len(caches) != len(kv.layout.layers):
        raise LayoutMismatch(f"the KV has {len(kv.layout.layers)} layers, the model {len(caches)}")
    if kv.tokens == 0:
        return caches
    for index, (cache, layout) in enumerate(zip(caches, kv.layout.layers, strict=True)):
        if isinstance(cache, ArraysCache):
            cache.cache = [
                _array(buffer, (1, *state.shape), state.dtype)
                for buffer, state in zip(kv.states[index], layout.states, strict=True)
            ]
        else:
            _fill(cache, *_keys_and_values(kv, index, layout), index=index, tokens=kv.tokens)
    mx.eval([cache.state for cache in caches])
    return caches


def _keys_and_values(kv: ReceivedKV, index: int, layout: LayerLayout) -> tuple[Any, Any]:
    rows = len(layout.rows(kv.tokens))
    keys = _array(kv.keys[index], (1, layout.kv_heads, rows, layout.key_dim), kv.layout.dtype)
    values = _array(kv.values[index], (1, layout.kv_heads, rows, layout.value_dim), kv.layout.dtype)
    return keys, values


def _fill(cache: Any, keys: Any, values: Any, *, index: int, tokens: int) -> None:
    rows = keys.shape[2]
    wanted = min(tokens, cache.max_size) if isinstance(cache, RotatingKVCache) else tokens
    if rows != wanted:
        raise LayoutMismatch(
            f"layer {index}: the KV holds {rows} of {tokens} tokens, mlx-lm's {type(cache).__name__} needs {wanted}"
        )
    if isinstance(cache, RotatingKVCache):
        # In temporal order and full up to `rows`: the next token is written at index `rows`, or wraps around.
        cache.state = (keys, values, tokens, cache.keep, cache.max_size, rows)
    elif isinstance(cache, KVCache):
        cache.state = (keys, values, tokens)
    else:
        raise LayoutMismatch(f"layer {index}: a {type(cache).__name__} cannot be filled from received KV")


def _array(buffer: Buffer, shape: tuple[int, ...], dtype: str) -> Any:
    array = mx.array(np.asarray(buffer).view(_NUMPY[dtype]).reshape(shape))
    return array.view(mx.bfloat16) if dtype == "bfloat16" else array
