"""Gated delta nets: a convolution over queries, keys and values, and a recurrent matrix per head.

Recurrent states are float32 whatever the model's dtype. transformers keeps each matrix transposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

from disagg.api.layout import LayerLayout, StateTensor
from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import (
    Architecture,
    Config,
    Convolved,
    MLXModel,
    ReadByVLLM,
    Tensor,
    convolution_rows,
    convolution_window,
    no_rope,
    plain_rope,
)
from disagg.engines.model.architectures.latent import latent, latent_rope, pairs_together
from disagg.engines.model.profile import Rope


def gated_delta(config: Config) -> LayerLayout:
    """qwen3_next: a convolution over queries, keys and values, and a matrix per value head."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    matrix = (config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim)
    return LayerLayout(
        "state",
        states=(convolution_window(config.linear_conv_kernel_dim, 2 * keys + values), StateTensor(matrix, "float32")),
    )


def gated_delta_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return convolution_rows(convolutions[0]), recurrent[0].transpose(-1, -2)


def gated_delta_parts(config: Config) -> Convolved:
    """Queries, keys and values."""
    keys = (int(config.linear_num_key_heads), int(config.linear_key_head_dim))
    values = (int(config.linear_num_value_heads), int(config.linear_value_head_dim))
    return Convolved((keys, keys, values), value=2, key=1)


def kimi_delta(config: Config) -> LayerLayout:
    """kimi_linear: three convolutions, which transformers keeps as one, and a matrix per head."""
    width = config.linear_num_heads * config.linear_head_dim
    matrix = (config.linear_num_heads, config.linear_head_dim, config.linear_head_dim)
    window = convolution_window(config.linear_conv_kernel_dim, width)
    return LayerLayout("state", states=(window, window, window, StateTensor(matrix, "float32")))


def kimi_delta_parts(config: Config) -> Convolved:
    return Convolved(((int(config.linear_num_heads), int(config.linear_head_dim)),) * 3, value=2, key=1)


def kimi_delta_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return *convolution_rows(convolutions[0]).chunk(3, dim=-1), recurrent[0].transpose(-1, -2)


def split_delta(config: Config) -> LayerLayout:
    """olmo_hybrid: a gated delta net with three convolutions, which transformers keeps as one."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    windows = (convolution_window(config.linear_conv_kernel_dim, width) for width in (keys, keys, values))
    return LayerLayout("state", states=(*windows, gated_delta(config).states[-1]))


def split_delta_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    matrix = recurrent[0].transpose(-1, -2)
    rows = convolution_rows(convolutions[0])
    values = matrix.shape[1] * matrix.shape[2]
    keys = (rows.shape[-1] - values) // 2
    return *rows.split([keys, keys, values], dim=-1), matrix


def _rope_if_based(config: Config, layer: int, kind: str) -> Rope | None:
    """A base that is null is none."""
    return plain_rope(config, layer, kind) if (config.rope_parameters or {}).get("rope_theta") else None


def _width_of_linear_heads(config: Config) -> Mapping[str, Any]:
    """bailing_hybrid: transformers has the width of what rotates under the name of the width of heads."""
    return {"head_dim": config.linear_head_dim}


def with_norms_of_the_hub(model_class: MLXModel) -> MLXModel:
    """mlx-lm's olmo_hybrid Model, as a class that also takes the hub's names of two norms, which mlx-lm 0.32 does not
    know."""

    class OlmoHybrid(model_class):
        def sanitize(self, weights: Mapping[str, Any]) -> Any:
            names = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
            for hub, name in names.items():
                weights = {key.replace(f".{hub}.", f".{name}."): array for key, array in weights.items()}
            return super().sanitize(weights)

    return OlmoHybrid


_GATED_DELTA = Architecture(
    kinds={"linear_attention": gated_delta}, wire_states=gated_delta_states, convolved=gated_delta_parts
)


ARCHITECTURES = {
    "qwen3_next": _GATED_DELTA,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
    "kimi_linear": Architecture(
        kinds={"linear_attention": kimi_delta, "full_attention": latent},
        rope=no_rope,
        wire_states=kimi_delta_states,
        convolved=kimi_delta_parts,
    ),
    "bailing_hybrid": Architecture(
        kinds={"linear_attention": kimi_delta, "full_attention": latent},
        rope=latent_rope,
        wire_states=kimi_delta_states,
        wire_values=pairs_together,
        float32=("A_log", "dt_bias"),
        mlx_arguments=_width_of_linear_heads,
    ),
    "olmo_hybrid": Architecture(
        kinds={"linear_attention": split_delta},
        rope=_rope_if_based,
        wire_states=split_delta_states,
        mlx_model=with_norms_of_the_hub,
    ),
}


def prompts_of_one_token(read: ReadByVLLM) -> list[PreflightFinding]:
    """Copy the only row of a prompt of one token before the convolution of a gated delta net. That of vLLM's CPU build
    (0.32) refuses a row that is a part of a wider tensor, as it is in qwen3_5."""
    if read.device != "cpu" or read.text_config.model_type not in ("qwen3_5_text", "qwen3_5_moe_text"):
        return []
    import torch
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    own = gdn_attention._causal_conv1d_fwd_cpu
    if not hasattr(own, "__wrapped__"):

        @wraps(own)
        def of_copied_row(*, x: Any, **options: Any) -> Any:
            if x.shape[1] == 1:
                x = x.T.clone(memory_format=torch.contiguous_format).T
            return own(x=x, **options)

        gdn_attention._causal_conv1d_fwd_cpu = of_copied_row
    return [PreflightFinding("convolutions", "patched", "vLLM fails on prompts of one token; set right")]
