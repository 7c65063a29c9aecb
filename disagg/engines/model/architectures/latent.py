"""Latent attention (MLA): a layer keeps one latent vector and one rotated vector per token, shared by all heads.

They travel as the keys and the values of one head. transformers keeps the halves of the rotated pairs apart, mlx-lm
keeps each pair together. Of deepseek_v2 and minicpm3 mlx-lm keeps the keys and values of every head, which are nine
times as many bytes for DeepSeek-V2-Lite: they get the attention that mlx-lm has for deepseek_v3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from disagg.api.layout import LayerLayout
from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import (
    Architecture,
    Config,
    LoadedByMLX,
    MLXModel,
    Tensor,
)
from disagg.engines.model.profile import Rope
from disagg.engines.model.rope import reference_rope


def latent(config: Config) -> LayerLayout:
    """The layout of a layer: the latent vector as the key of one head, the rotated one as its value."""
    return LayerLayout("full", 1, int(config.kv_lora_rank), int(config.qk_rope_head_dim))


def latent_rope(config: Config, layer: int, kind: str) -> Rope | None:
    """The rotary embedding of the rotated vector, the same in every layer."""
    width = int(config.qk_rope_head_dim)
    return reference_rope(config.rope_parameters, width, int(config.max_position_embeddings))


def pairs_together(rows: Tensor) -> Tensor:
    """[a0 a1 ... b0 b1 ...] -> [a0 b0 a1 b1 ...] in the last dimension."""
    return rows.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


@cache
def _latent_attention() -> Any:
    from mlx_lm.models.base import create_attention_mask
    from mlx_lm.models.deepseek_v3 import DeepseekV3Attention

    class LatentAttention(DeepseekV3Attention):
        """mlx-lm's own, in models that do not make the array that it wants as its mask."""

        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            if isinstance(mask, str):
                mask = create_attention_mask(x, cache, return_array=True)
            return super().__call__(x, mask, cache)

    return LatentAttention


def with_latents(model_class: MLXModel) -> MLXModel:
    """mlx-lm's Model as a class that keeps latent vectors in place of the keys and values of every head."""
    from mlx_lm.models.rope_utils import initialize_rope

    class WithLatents(model_class):
        def __init__(self, args: Any) -> None:
            scaling = args.rope_scaling or {"factor": 1.0}  # mlx-lm wants some, for rotary modules that are replaced
            super().__init__(replace(args, rope_scaling=scaling))
            stated = SimpleNamespace(v_head_dim=args.hidden_size // args.num_attention_heads)
            stated.__dict__.update(vars(args))
            for layer in self.layers:
                layer.self_attn = _latent_attention()(stated)
                layer.self_attn.rope = initialize_rope(
                    args.qk_rope_head_dim,
                    args.rope_theta,
                    args.model_type == "deepseek_v2",
                    args.rope_scaling,
                    args.max_position_embeddings,
                )

        def sanitize(self, weights: dict[str, Any]) -> Any:
            if hasattr(model_class, "sanitize"):
                weights = super().sanitize(weights)
            for index, layer in enumerate(self.layers):
                prefix = f"model.layers.{index}.self_attn"
                _split_by_head(weights, prefix, layer.self_attn)
            return weights

    return WithLatents


def with_scaled_logits(model_class: MLXModel) -> MLXModel:
    """The same for minicpm3, whose logits mlx-lm does not scale if the output head is the embeddings."""
    latents: Any = with_latents(model_class)

    class Scaled(latents):
        def __call__(self, *arguments: Any, **options: Any) -> Any:
            logits, args = super().__call__(*arguments, **options), self.args
            return logits / (args.hidden_size / args.dim_model_base) if args.tie_word_embeddings else logits

    return Scaled


def _split_by_head(weights: dict[str, Any], prefix: str, attention: Any) -> None:
    """Replace kv_b_proj by what mlx-lm's attention of deepseek_v3 has: from latent vectors to the keys of each head,
    and to its values. Packed weights are unpacked and stay so: packing them anew would change them."""
    from mlx import core as mx

    name = f"{prefix}.kv_b_proj"
    if (both := weights.pop(f"{name}.weight", None)) is None:
        return
    if (scales := weights.pop(f"{name}.scales", None)) is not None:
        group = attention.kv_lora_rank // scales.shape[-1]
        bits = both.shape[-1] * 32 // attention.kv_lora_rank
        biases = weights.pop(f"{name}.biases", None)
        mode = "affine" if biases is not None else f"mxfp{bits}"
        both = mx.dequantize(both, scales, biases, group_size=group, bits=bits, mode=mode)
    by_head = both.reshape(attention.num_heads, -1, attention.kv_lora_rank)
    keys, values = mx.split(by_head, [attention.qk_nope_head_dim], axis=1)
    weights[f"{prefix}.embed_q.weight"] = mx.contiguous(keys.swapaxes(1, 2))
    weights[f"{prefix}.unembed_out.weight"] = mx.contiguous(values)


def kept_latents(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Report the layers that keep latent vectors here and heads in mlx-lm."""
    count = sum(isinstance(module, _latent_attention()) for module in loaded.model.modules())
    detail = f"on {count} layers mlx-lm keeps the keys and values of every head, here latent vectors"
    return [PreflightFinding("latent vectors", "patched", detail)] if count else []


def _always(config: Config) -> float:
    """The epsilon that transformers, mlx-lm and the models' own code have for latent vectors, whatever config.json
    states for the other norms."""
    return 1e-6


def _rope_of_the_rotated(config: Config, layer: int, kind: str) -> Rope | None:
    """mistral4 states the width of the rotated vector twice: also as a part of the head's."""
    parameters = {key: value for key, value in config.rope_parameters.items() if key != "partial_rotary_factor"}
    return reference_rope(parameters, int(config.qk_rope_head_dim), int(config.max_position_embeddings))


_AS_IN_MLX = Architecture(kinds={"full_attention": latent}, rope=latent_rope)
_LATENT = replace(_AS_IN_MLX, wire_values=pairs_together)


ARCHITECTURES = {
    "deepseek_v3": replace(_LATENT, latent_epsilon=_always),
    "glm4_moe_lite": _LATENT,
    "mistral4": replace(_LATENT, latent_epsilon=_always, rope=_rope_of_the_rotated),
    "deepseek_v2": replace(_AS_IN_MLX, mlx_model=with_latents, latent_epsilon=_always),
    "minicpm3": replace(_AS_IN_MLX, mlx_model=with_scaled_logits, latent_epsilon=_always),
}


def halves_rotated(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Of a checkpoint with `rope_interleave: false`, whose pairs are a coordinate of one half and one of the other, put
    the coordinates of each pair beside each other in what the projections compute: mlx-lm rotates neighbours."""
    if getattr(loaded.text_config, "rope_interleave", True) is not False:
        return []
    count = 0
    turning = (parent for _, parent, _, rope in loaded.ropes if getattr(rope, "traditional", False))
    for parent in {id(parent): parent for parent in turning if "kv_a_proj_with_mqa" in parent}.values():
        width = int(parent.qk_rope_head_dim)
        for name in ("q_proj", "q_b_proj", "kv_a_proj_with_mqa"):
            if name in parent:
                head = parent.q_head_dim if name.startswith("q_") else parent.kv_lora_rank + width
                _put_pairs_together(parent[name], int(head), width)
        count += 1
    detail = f"on {count} layers mlx-lm ignores rope_interleave=false; applied"
    return [PreflightFinding("pairs", "patched", detail)] if count else []


def _put_pairs_together(projection: Any, head: int, width: int) -> None:
    """Reorder the last `width` of each `head` outputs of a linear layer, packed or not."""
    from mlx import core as mx

    half = width // 2
    kept, pairs = range(head - width), ((head - width + i, head - width + half + i) for i in range(half))
    order = mx.array([*kept, *(at for pair in pairs for at in pair)])
    for name, array in projection.items():
        if isinstance(array, mx.array):
            projection[name] = mx.unflatten(array, 0, (-1, head))[:, order].flatten(0, 1)
    mx.eval(projection)
