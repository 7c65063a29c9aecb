"""olmo, the first one: norms without weights, and projections whose results are clipped; olmoe's are, too.

mlx-lm's own module of this name reads another form of checkpoint, and a package for it. In the hub's form olmo is a
llama with other norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import Architecture, Config, LoadedByMLX, MLXModel

_EPSILON = 1e-5  # transformers has no key for it


def _of_llama(config: Config) -> Mapping[str, Any]:
    return {"rms_norm_eps": _EPSILON}


def with_plain_norms(model_class: MLXModel) -> MLXModel:
    """mlx-lm's llama as a class whose norms have no weights."""
    from mlx import nn

    class Olmo(model_class):
        def __init__(self, args: Any) -> None:
            super().__init__(args)

            def norm() -> Any:
                return nn.LayerNorm(args.hidden_size, _EPSILON, affine=False)

            self.model.norm = norm()
            for layer in self.layers:
                layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()

    return Olmo


ARCHITECTURES = {"olmo": Architecture(mlx_model=with_plain_norms, mlx_module="llama", mlx_arguments=_of_llama)}


def stated_clips(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Clip queries, keys and values as config.json states (clip_qkv): after their norms, if they have one."""
    limit = getattr(loaded.text_config, "clip_qkv", None)
    if not limit or loaded.text_config.model_type not in ("olmo", "olmoe"):
        return []
    attentions = [layer.self_attn for layer in loaded.model.layers]
    for attention in attentions:
        for part in ("q", "k", "v"):
            last = f"{part}_norm" if f"{part}_norm" in attention else f"{part}_proj"
            attention[last].__class__ = _clipping(type(attention[last]), float(limit))
    detail = f"on {len(attentions)} layers mlx-lm ignores clip_qkv = {limit:g}; applied"
    return [PreflightFinding("attention", "patched", detail)]


def _clipping(kind: Any, limit: float) -> Any:
    from mlx import core as mx

    class Clipping(kind):
        def __call__(self, x: Any) -> Any:
            return mx.clip(super().__call__(x), -limit, limit)

    return Clipping
