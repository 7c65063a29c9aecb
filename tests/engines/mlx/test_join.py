"""Held rows and received rows make the caches of one prefill, bit for bit."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from disagg.api.layout import LayerLayout, Layout, StateTensor
from disagg.api.names import INT8
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.mlx import memory as mlx_memory
from disagg.engines.mlx.prefix_cache import CachedPrefix, covers, make_prefix_cache, rows, snapshot
from disagg.errors import LayoutMismatch
from disagg.kv.arena import Arenas
from disagg.kv.received import ByteRanges, ReceivedKV
from tests.received import received
from tests.values import present

HEADS, KEY, VALUE, WINDOW, LONGEST = 2, 64, 4, 16, 100
LAYOUT = Layout(
    (
        LayerLayout("full", HEADS, KEY, VALUE),
        LayerLayout("sliding", HEADS, KEY, VALUE, window=WINDOW),
        LayerLayout("full", HEADS, KEY, VALUE),
    ),
    "float32",
)
RNG = np.random.default_rng(0)
EVERY_ROW = [
    (
        RNG.normal(size=(HEADS, LONGEST, KEY)).astype(np.float32),
        RNG.normal(size=(HEADS, LONGEST, VALUE)).astype(np.float32),
    )
    for _ in LAYOUT.layers
]


def model(*kinds: Any) -> Any:
    return SimpleNamespace(make_cache=lambda: [kind() for kind in kinds])


MODEL = model(KVCache, lambda: RotatingKVCache(WINDOW), KVCache)


def kv_of(tokens: int, start: int = 0) -> ReceivedKV:
    """The KV of tokens [start, tokens), as it is received."""
    keys: list[Any] = []
    values: list[Any] = []
    for layer, (all_keys, all_values) in zip(LAYOUT.layers, EVERY_ROW, strict=True):
        kept = layer.rows(tokens, start)
        for side, array in ((keys, all_keys), (values, all_values)):
            side.append(np.ascontiguousarray(array[:, kept.start : kept.stop]).view(np.uint8).reshape(-1))
    return received(LAYOUT, tokens, keys, values, start=start)


def held(tokens: int, *parts: int) -> CachedPrefix:
    """What is held of the first `tokens` tokens after requests that ended there and at `parts`."""
    store = make_prefix_cache(MODEL, 1 << 30)
    for end in sorted({*parts, tokens}):
        caches = mlx_cache.build(MODEL, kv_of(end))
        taken = present(snapshot(caches, end))
        store.add(range(end), "", partial(rows, caches), {end: taken})
    return present(store.find(range(tokens), "")).read()


def require_same(built: list[Any], tokens: int) -> None:
    for cache, layer, (keys, values) in zip(built, LAYOUT.layers, EVERY_ROW, strict=True):
        kept = layer.rows(tokens)
        assert cache.offset == tokens
        assert np.array_equal(np.array(cache.keys)[0], keys[:, kept.start : kept.stop])
        assert np.array_equal(np.array(cache.values)[0], values[:, kept.start : kept.stop])
        if isinstance(cache, RotatingKVCache):
            assert (cache._idx, cache.max_size, cache.keep) == (len(kept), WINDOW, 0)


@pytest.mark.parametrize("new", [0, 1, WINDOW - 1, WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("before", [WINDOW, WINDOW + 1, 50])
def test_held_and_received_rows_make_the_caches_of_one_prefill(before: int, new: int) -> None:
    built = mlx_cache.build(MODEL, kv_of(before + new, before), held(before, 17, 40))
    require_same(built, before + new)


@pytest.mark.parametrize("tokens", [WINDOW, WINDOW + 1, 50])
def test_held_rows_alone_make_the_caches_of_one_prefill(tokens: int) -> None:
    require_same(mlx_cache.build(MODEL, None, held(tokens, 20)), tokens)


def test_rows_that_were_quantised_on_the_wire_follow_held_ones() -> None:
    kv = ReceivedKV(
        LAYOUT, 60, Arenas(mlx_memory.allocate).acquire(ByteRanges.of(LAYOUT, 60, 50, INT8).nbytes), 50, INT8
    )
    for planes, values, (all_keys, all_values) in zip(kv.keys, kv.values, EVERY_ROW, strict=True):
        made = mx.quantize(mx.array(all_keys[:, 50:60]), group_size=64, bits=8)
        for plane, array in zip(planes, made, strict=True):
            plane[:] = np.asarray(array.view(mx.uint8)).reshape(-1)
        values[0][:] = np.ascontiguousarray(all_values[:, 50:60]).view(np.uint8).reshape(-1)

    full, sliding, _ = mlx_cache.build(MODEL, kv, held(50))

    assert np.array_equal(np.array(full.keys)[0, :, :50], EVERY_ROW[0][0][:, :50])
    assert np.allclose(np.array(full.keys)[0], EVERY_ROW[0][0][:, :60], atol=0.05)
    assert np.allclose(np.array(sliding.keys)[0], EVERY_ROW[1][0][:, 60 - WINDOW : 60], atol=0.05)
    assert np.array_equal(np.array(sliding.values)[0], EVERY_ROW[1][1][:, 60 - WINDOW : 60])


def test_a_received_state_replaces_the_held_one() -> None:
    layout = Layout((LayerLayout("state", states=(StateTensor((3, 4)),)),), "bfloat16")
    states_model, nothing = model(lambda: ArraysCache(1)), [np.zeros(0, np.uint8)]
    first, second = (RNG.normal(size=12).astype(np.float32) for _ in range(2))
    store = make_prefix_cache(states_model, 1 << 20)
    caches = mlx_cache.build(states_model, received(layout, 20, nothing, nothing, [[first.view(np.uint8)]]))
    store.add(range(20), "", partial(rows, caches), {20: present(snapshot(caches, 20))})
    assert store.find(range(19), "") is None, "a state cannot be cut"
    prefix = present(store.find(range(30), "")).read()

    (alone,) = mlx_cache.build(states_model, None, prefix)
    kv = received(layout, 29, nothing, nothing, [[second.view(np.uint8)]], start=20)
    (joined,) = mlx_cache.build(states_model, kv, prefix)

    assert np.array_equal(np.array(alone.cache[0]).reshape(-1), first)
    assert np.array_equal(np.array(joined.cache[0]).reshape(-1), second)


def test_what_is_held_does_not_change_with_the_memory_that_it_came_from() -> None:
    """Memory so small that mx.contiguous would share it."""
    array = np.arange(HEADS * 16 * KEY, dtype=np.float32)
    layout = Layout((LayerLayout("full", HEADS, KEY, KEY),), "float32")
    kv = received(layout, 16, [array.view(np.uint8)], [array.view(np.uint8)])
    caches = mlx_cache.build(model(KVCache), kv)
    kept = rows(caches, 0, 16).layers[0]
    present(kv.arena).data[:] = 0x3F
    assert all(np.array_equal(np.array(part).reshape(-1), array) for part in present(kept))


def test_held_rows_that_do_not_reach_the_received_ones_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="layer 0: the KV has 57 of 60 tokens"):
        mlx_cache.build(MODEL, kv_of(60, 53), held(50))


@pytest.mark.parametrize("kind", [QuantizedKVCache, CacheList, lambda: RotatingKVCache(WINDOW, keep=4)])
def test_caches_that_cannot_be_held_are_not(kind: Any) -> None:
    assert make_prefix_cache(model(KVCache, kind), 1 << 30).limit == 0


def test_caches_without_their_rows_do_not_cover_a_request() -> None:
    caches = mlx_cache.build(MODEL, kv_of(50))
    assert covers(caches, 50)
    assert not covers(caches, 51)
    assert not covers([*caches, CacheList(KVCache())], 50)
    assert not covers([KVCache()], 0)
