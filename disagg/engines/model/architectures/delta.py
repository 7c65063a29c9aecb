"""Gated delta nets: a convolution over queries, keys and values, and a recurrent matrix per head.

Recurrent states are float32 whatever the model's dtype. transformers keeps each matrix transposed.
"""

from __future__ import annotations

from collections.abc import Sequence

from disagg.api.layout import LayerLayout, StateTensor
from disagg.engines.model.architectures.base import (
    Architecture,
    Config,
    Convolved,
    Tensor,
    convolution_rows,
    convolution_window,
    no_rope,
)
from disagg.engines.model.architectures.latent import latent


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
}
