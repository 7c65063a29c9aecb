"""Received bytes as mlx-lm's caches: exact offsets, exact rows, exact bits."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from disagg.api.layout import LayerLayout, Layout, StateTensor
from disagg.api.names import INT8
from disagg.engines.mlx import cache as mlx_cache
from disagg.engines.mlx import memory as mlx_memory
from disagg.errors import LayoutMismatch
from disagg.kv.arena import Arenas
from disagg.kv.received import ByteRanges, ReceivedKV
from tests.faults.fleet import POOLS
from tests.received import received
from tests.values import present

HEADS, KEY, VALUE, WINDOW = 2, 8, 4, 16
LAYERS = (LayerLayout("full", HEADS, KEY, VALUE), LayerLayout("sliding", HEADS, KEY, VALUE, window=WINDOW))
RNG = np.random.default_rng(0)


def model(*kinds: Any) -> Any:
    return SimpleNamespace(make_cache=lambda: [kind() for kind in kinds])


MODEL = model(KVCache, lambda: RotatingKVCache(WINDOW))


def kv_of(tokens: int, dtype: str = "float32", layers: Any = LAYERS) -> ReceivedKV:
    layout = Layout(layers, dtype)
    keys: list[Any] = []
    values: list[Any] = []
    for layer in layers:
        rows = layer.kv_heads * len(layer.rows(tokens))
        for side, dim in ((keys, layer.key_dim), (values, layer.value_dim)):
            side.append(RNG.normal(size=rows * dim).astype(np.float32).view(np.uint8)[: rows * dim * layout.itemsize])
    return received(layout, tokens, keys, values)


@pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW])
def test_offsets_rows_and_write_index_are_exact(tokens: Any) -> None:
    kv = kv_of(tokens)

    full, sliding = mlx_cache.build(MODEL, kv)

    kept = min(tokens, WINDOW)
    assert full.offset == tokens == sliding.offset
    assert full.keys.shape == (1, HEADS, tokens, KEY)
    assert full.values.shape == (1, HEADS, tokens, VALUE)
    assert sliding.keys.shape == (1, HEADS, kept, KEY)
    assert (sliding._idx, sliding.max_size, sliding.keep) == (kept, WINDOW, 0)
    assert np.array_equal(np.array(sliding.keys).reshape(-1), kv.keys[1][0].view(np.float32))


@pytest.mark.parametrize(("dtype", "bits"), [("float32", mx.uint32), ("float16", mx.uint16), ("bfloat16", mx.uint16)])
def test_every_bit_arrives_in_every_dtype(dtype: str, bits: Any) -> None:
    kv = kv_of(7, dtype)

    full, _ = mlx_cache.build(MODEL, kv)

    assert str(full.keys.dtype) == f"mlx.core.{dtype}"
    assert np.array(full.values.view(bits)).tobytes() == kv.values[0][0].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_quantised_kv_becomes_what_mlx_makes_of_the_exact_kv(dtype: str) -> None:
    layers = (LayerLayout("full", HEADS, 64, 40), LayerLayout("sliding", HEADS, 128, 64, window=WINDOW))
    layout, tokens = Layout(layers, dtype), 2 * WINDOW
    arena = Arenas(mlx_memory.allocate).acquire(ByteRanges.of(layout, tokens, wire=INT8).nbytes)
    kv = ReceivedKV(layout, tokens, arena, wire=INT8)
    exact = []
    for layer, keys, values in zip(layers, kv.keys, kv.values, strict=True):
        for planes, dim in ((keys, layer.key_dim), (values, layer.value_dim)):
            shape = (1, HEADS, len(layer.rows(tokens)), dim)
            exact.append(mx.array(RNG.normal(size=shape)).astype(getattr(mx, dtype)))
            made = mx.quantize(exact[-1], group_size=64, bits=8) if dim % 64 == 0 else [exact[-1]]
            for plane, array in zip(planes, made, strict=True):
                plane[:] = np.asarray(array.view(mx.uint8)).reshape(-1)

    built = [array for cache in mlx_cache.build(MODEL, kv) for array in (cache.keys, cache.values)]

    for array, origin in zip(built, exact, strict=True):
        whole = origin.shape[-1] % 64 == 0
        want = mx.dequantize(*mx.quantize(origin, group_size=64, bits=8), group_size=64, bits=8) if whole else origin
        assert (array.dtype, array.shape) == (origin.dtype, origin.shape)
        assert np.array_equal(np.asarray(array.view(mx.uint8)), np.asarray(want.view(mx.uint8)))


def test_no_tokens_make_fresh_caches() -> None:
    full, sliding = mlx_cache.build(MODEL, kv_of(0))

    assert full.empty() and sliding.empty()


def test_the_caches_are_views_of_the_received_bytes_and_nothing_is_copied() -> None:
    kv = kv_of(500)
    before = mx.get_active_memory()
    full, _ = mlx_cache.build(MODEL, kv)

    assert mx.get_active_memory() == before
    kv.keys[0][0][:] = 0
    assert not np.array(full.keys).any()


def test_a_token_on_top_of_the_caches_leaves_the_received_bytes_as_they_were() -> None:
    kv = kv_of(2 * WINDOW)
    before = present(kv.arena).data.tobytes()
    for cache, layer in zip(mlx_cache.build(MODEL, kv), LAYERS, strict=True):
        ones = mx.ones((1, HEADS, 1, KEY)), mx.ones((1, HEADS, 1, VALUE))
        mx.eval(cache.update_and_fetch(*ones))
        assert layer.kv_heads == cache.keys.shape[1]

    assert present(kv.arena).data.tobytes() == before


def test_memory_may_be_larger_than_the_longest_dimension_of_an_array() -> None:
    memory = mlx_memory.allocate((1 << 31) + 1)

    assert memory.nbytes > 1 << 31
    assert not memoryview(memory).readonly


def test_released_kv_makes_no_caches() -> None:
    kv = kv_of(5)
    kv.release()
    with pytest.raises(LayoutMismatch, match="released"):
        mlx_cache.build(MODEL, kv)


def test_memory_that_mlx_does_not_have_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        mlx_memory.allocate(1 << 60)


def test_memory_for_many_transfers_leaves_no_thread_behind_for_each() -> None:
    def threads() -> int:
        return psutil.Process().num_threads()

    def transfers(count: int) -> None:  # each on a thread of its own, as KV connections are
        for _ in range(count):
            thread = threading.Thread(target=mlx_memory.allocate, args=(1000,))
            thread.start()
            thread.join()

    before = threads()
    transfers(40)

    assert threads() - before < 20  # the few that make memory for all, whatever the number of transfers


def test_states_become_an_arrays_cache() -> None:
    layers = (LayerLayout("state", states=(StateTensor((3, 4)), StateTensor((2, 2), "bfloat16"))),)
    states = [RNG.normal(size=12).astype(np.float32).view(np.uint8), np.arange(8, dtype=np.uint8)]
    nothing = [np.zeros(0, np.uint8)]
    kv = received(Layout(layers, "bfloat16"), 9, nothing, nothing, [states])

    (cache,) = mlx_cache.build(model(lambda: ArraysCache(2)), kv)

    assert [a.shape for a in cache.cache] == [(1, 3, 4), (1, 2, 2)]
    assert [str(a.dtype) for a in cache.cache] == ["mlx.core.float32", "mlx.core.bfloat16"]
    assert np.array_equal(np.array(cache.cache[0]).reshape(-1), states[0].view(np.float32))


def test_kv_that_does_not_fit_the_model_is_refused_by_layer() -> None:
    with pytest.raises(LayoutMismatch, match="the KV has 2 layers, the model 1"):
        mlx_cache.build(model(KVCache), kv_of(5))
    with pytest.raises(LayoutMismatch, match="layer 1: the KV has 16 of 20 tokens, mlx-lm's KVCache needs 20"):
        mlx_cache.build(model(KVCache, KVCache), kv_of(20))
    with pytest.raises(LayoutMismatch, match="layer 0: a CacheList cannot be filled"):
        mlx_cache.build(model(CacheList), kv_of(5, layers=LAYERS[:1]))
    narrow = replace(LAYERS[1], window=8)
    with pytest.raises(LayoutMismatch, match="layer 1: the KV has 8 of 20 tokens"):
        mlx_cache.build(MODEL, kv_of(20, layers=(LAYERS[0], narrow)))


def test_the_pool_that_allocates_memory_is_as_large_as_the_fault_harness_allows_threads() -> None:
    assert 2 * mlx_memory._ALLOCATORS._max_workers == POOLS["kv-memory"]
