"""Measure what mlx-lm computes for a loaded model, from its modules rather than from its config.

Layer kinds come from the model's caches, head counts and dims from running one token, and rotary embeddings from
feeding unit vectors at position 1 through each layer's rope module: the angle by which a pair of coordinates turns is
its frequency. This works for every rope class, half-split or interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from disagg.api.layout import LayerLayout, Layout, StateTensor
from disagg.engines.mlx.cache import entries_of
from disagg.engines.model.architectures.weights import has_head
from disagg.engines.model.profile import LayerProfile, Rope, cannot_compute
from disagg.errors import ModelError


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one token run through the model. dtype: that of keys and values, e.g. "bfloat16". tied: the
    output head is the embeddings."""

    layers: tuple[LayerProfile, ...]
    vocab_size: int
    dtype: str
    tied: bool

    @property
    def layout(self) -> Layout:
        return Layout(tuple(layer.layout for layer in self.layers), self.dtype)


def measure(model: Any, count: int | None = None) -> Measured:
    """Run one token through `model` and measure what its layers keep, or the first `count` of that. ModelError for
    caches that cannot be handed over."""
    spies, asked = _spy_on_ropes(model), list[Any]()
    try:
        caches = make_prompt_cache(model)
        with _asked_for_output(model, asked):
            logits = model(mx.array([[0]]), cache=caches)
        caches = entries_of(caches)[:count]
        mx.eval([cache.state for cache in caches])
    except Exception as error:  # which one depends on the architecture
        raise cannot_compute("mlx-lm", error) from error
    finally:
        for spy in spies:
            spy.parent[spy.name] = spy.rope
    ropes = {spy.layer: probe(spy.rope, spy.width) for spy in spies if spy.width}
    layers = tuple(LayerProfile(_layout(i, cache), ropes.get(i)) for i, cache in enumerate(caches))
    # Some embeddings have a head of their own (weights.py), and some models multiply with their weights themselves.
    tied = any("head" not in embeddings for embeddings in asked) if asked else not has_head(model)
    return Measured(layers, logits.shape[-1], _kv_dtype(caches), tied)


@contextmanager
def _asked_for_output(model: Any, asked: list[Any]) -> Iterator[None]:
    """Put into `asked` the embeddings that compute logits meanwhile."""
    known = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.QuantizedEmbedding)]
    classes = [type(one) for one in known]
    for one, kind in zip(known, classes, strict=True):
        one.__class__ = _reporting(kind, asked)
    try:
        yield
    finally:
        for one, kind in zip(known, classes, strict=True):
            one.__class__ = kind


def _reporting(kind: Any, asked: list[Any]) -> Any:
    class Reporting(kind):
        def as_linear(self, x: Any) -> Any:
            asked.append(self)
            return super().as_linear(x)

    return Reporting


def probe(rope: Any, width: int) -> Rope | None:
    """Frequencies and scale of a rope module that rotates vectors of `width`; None if it rotates nothing.

    Row i of the output is unit vector i rotated: `scale * cos` in place i and `scale * sin` in its partner's place.
    Always computed on the CPU: a GPU's fast sine is too imprecise for slow frequencies.
    """
    with mx.stream(mx.cpu):
        output = rope(mx.eye(width).reshape(width, 1, 1, width), offset=1).astype(mx.float32)
        mx.eval(output)
    turned = np.array(output).reshape(width, width).astype(np.float64)
    frequencies, scales = [], []
    for i, row in enumerate(turned):
        partner = int(np.argmax(np.abs(np.where(np.arange(width) == i, 0.0, row))))
        if partner > i and row[partner] != 0.0:
            frequencies.append(math.atan2(row[partner], row[i]))
            scales.append(math.hypot(row[partner], row[i]))
    return Rope(tuple(frequencies), float(np.mean(scales))) if frequencies else None


def rope_modules(model: Any) -> Iterator[tuple[int, Any, str, Any]]:
    """(layer of the layout, parent, attribute, module) of every rope-like module inside the decoder layers."""
    caches, first = make_prompt_cache(model), 0
    for index, layer in enumerate(model.layers):
        for path, parent in layer.named_modules():
            for name, child in parent.children().items():
                if isinstance(child, nn.Module) and _is_rope(name, child):
                    yield first + (path.rpartition(".")[2] == "indexer"), parent, name, child
        first += len(entries_of(caches[index : index + 1])) or 1


def _is_rope(name: str, module: Any) -> bool:
    return "rope" in type(module).__name__.lower() or name in ("rope", "rotary_emb")


class _Spy(nn.Module):
    """Replaces a rope module during one call and records the width it was called with; 0 if it was not called.

    Its existence is not enough: cohere2's full-attention layers have a rope module that they never call.
    """

    def __init__(self, layer: int, parent: Any, name: str, rope: Any) -> None:
        super().__init__()
        self.layer, self.name, self.width = layer, name, 0
        # Set past nn.Module, which would make them children and the parent a cycle.
        object.__setattr__(self, "parent", parent)
        object.__setattr__(self, "rope", rope)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        self.width = int(x.shape[-1])
        return self.rope(x, *args, **kwargs)


def _spy_on_ropes(model: Any) -> list[_Spy]:
    spies = [_Spy(*module) for module in list(rope_modules(model))]
    for spy in spies:
        spy.parent[spy.name] = spy
    return spies


def _layout(index: int, cache: Any) -> LayerLayout:
    if isinstance(cache, RotatingKVCache):
        return _kv_layout("sliding", cache, cache.max_size)
    if isinstance(cache, KVCache):
        return _kv_layout("full", cache, None)
    if isinstance(cache, ArraysCache):
        states = tuple(StateTensor(tuple(a.shape[1:]), dtype_name(a)) for a in cache.cache)
        return LayerLayout("state", states=states)
    if isinstance(cache, CacheList) and [type(part) for part in cache.caches] == [ArraysCache, KVCache]:
        state, rows = (_layout(index, part) for part in cache.caches)
        return replace(rows, states=state.states)
    raise ModelError(
        f"layer {index} uses a {type(cache).__name__} as its cache, which the hand-off cannot fill",
        "serve this model on one machine, without a prefill host",
    )


def _kv_layout(kind: Any, cache: Any, window: int | None) -> LayerLayout:
    (_, heads, _, key_dim), value_dim = cache.keys.shape, cache.values.shape[3]
    return LayerLayout(kind if value_dim else "index", heads, key_dim, value_dim, window)


def _kv_dtype(caches: list[Any]) -> str:
    """That of keys and values, or if there are none, of the last inputs of convolutions."""
    parts = [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else (cache,))]
    rows = [part.keys for part in parts if not isinstance(part, ArraysCache)]
    names = {dtype_name(array) for array in rows or (part.cache[0] for part in parts)}
    if len(names) > 1:
        raise ModelError(f"the layers' KV has different dtypes: {', '.join(sorted(names))}")
    return names.pop()


def dtype_name(array: Any) -> str:
    """ "float32", "float16" or "bfloat16"."""
    return str(array.dtype).rpartition(".")[2]
