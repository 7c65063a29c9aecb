"""Sparse attention (DSA): deepseek_v32, glm_moe_dsa. Latent attention whose layers choose, by an indexer with keys of
its own, the tokens that each token attends to.

The keys of the indexers are layers of the layout, each behind the layer that it chooses for. Some layers of glm_moe_dsa
have no indexer, and take what the last one before them has chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from disagg.api.layout import LayerLayout
from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import Architecture, Config, LoadedByMLX, MLXModel, Tensor
from disagg.engines.model.architectures.latent import latent, latent_rope, pairs_together

_EPSILON = 1e-6
"""Of the norm of an indexer's keys, in transformers and in the models' own code. No configuration states it."""


def _index(config: Config, layer: int) -> LayerLayout | None:
    kinds = getattr(config, "indexer_types", None)
    own = kinds is None or kinds[layer] == "full"
    return LayerLayout("index", 1, int(config.index_head_dim)) if own else None


def _first_pairs_together(keys: Tensor, rotated: int) -> Tensor:
    """transformers keeps the halves of the rotated pairs apart, mlx-lm keeps each pair together."""
    from torch import cat

    return cat([pairs_together(keys[..., :rotated]), keys[..., rotated:]], dim=-1)


def _shared_choice(config: Config) -> str:
    shared = "shared" in (getattr(config, "indexer_types", None) or ())
    return "some of its layers attend to what earlier ones have chosen" if shared else ""


def indexer_norms(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Report the norms of the indexers' keys, to which `_with_indexers` has given the right epsilon."""
    from mlx_lm.models.deepseek_v32 import Indexer

    count = sum(isinstance(module, Indexer) for module in loaded.model.modules())
    detail = f"on {count} layers mlx-lm normalises the indexer's keys with an epsilon of 1e-05, not 1e-06; set right"
    return [PreflightFinding("indexer", "patched", detail)] if count else []


def _with_indexers(model_class: MLXModel) -> MLXModel:
    """mlx-lm's Model as a class whose indexers keep keys only, normalise them as the checkpoint wants, and are left out
    of the layers for which it has no weights of any."""
    from mlx_lm.models.cache import CacheList, KVCache

    indexer_class, attention_class = _mlx_classes()

    class Indexed(model_class):
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            chosen = _Chosen()
            for layer in self.layers:
                indexer = layer.self_attn.indexer
                indexer.__class__, indexer.chosen = indexer_class, chosen
                indexer.k_norm.eps = _EPSILON

        def sanitize(self, weights: Mapping[str, Any]) -> Any:
            weights = super().sanitize(weights)
            for index, layer in enumerate(self.layers):
                if f"model.layers.{index}.self_attn.indexer.wk.weight" not in weights:
                    attention = layer.self_attn
                    attention.__class__ = attention_class
                    attention.take_from(attention.indexer.chosen)
            return weights

        def make_cache(self) -> list[Any]:
            return [
                KVCache() if isinstance(layer.self_attn, attention_class) else CacheList(KVCache(), KVCache())
                for layer in self.layers
            ]

    return Indexed


class _Chosen:
    """What the last indexer that ran has chosen: indices of tokens, [batch, 1, tokens, top-k]; None: all of them."""

    indices: Any = None


class _Keys:
    """The cache of an indexer, as mlx-lm's Indexer uses it: it puts zeros in place of the values, as many as there are
    keys, which are not kept."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.offset = cache.offset
        self.keys = self.values = None

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        self.keys, none = self._cache.update_and_fetch(keys, values[..., :0])
        return self.keys, none


@cache
def _mlx_classes() -> tuple[Any, Any]:
    """mlx-lm's Indexer, and its attention without one."""
    from mlx import nn
    from mlx_lm.models.deepseek_v32 import DeepseekV32Attention, Indexer

    class IndexerOfKeys(Indexer):
        chosen: _Chosen

        def __call__(self, x: Any, qr: Any, mask: Any, cache: Any = None) -> Any:
            made = super().__call__(x, qr, mask, cache if cache is None else _Keys(cache))
            self.chosen.indices = made
            return made

    class Follower(nn.Module):
        """In place of an indexer: what the last one before it has chosen."""

        def __init__(self, chosen: _Chosen) -> None:
            super().__init__()
            self.chosen = chosen

        def __call__(self, x: Any, qr: Any, mask: Any, cache: Any = None) -> Any:
            return self.chosen.indices

    class FollowingAttention(DeepseekV32Attention):
        def take_from(self, chosen: _Chosen) -> None:
            self.indexer = Follower(chosen)

        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            return super().__call__(x, mask, cache if cache is None else (cache, cache))

    return IndexerOfKeys, FollowingAttention


_INDEXED = Architecture(
    kinds=dict.fromkeys(("indexed_attention", "deepseek_sparse_attention"), latent),  # so in transformers 5.17
    index=_index,
    rope=latent_rope,
    wire_values=pairs_together,
    split=_shared_choice,
    mlx_model=_with_indexers,
)

ARCHITECTURES = {
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": replace(_INDEXED, wire_index=_first_pairs_together),
}
