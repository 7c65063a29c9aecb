"""Layers that keep a state of a fixed size: convolutions, gated delta nets, Mamba 2.

transformers keeps the last K columns of a convolution of width K, [1, channels, K]; mlx-lm the last K - 1 as rows.
Recurrent states are float32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from disagg.api.layout import LayerLayout, StateTensor
from disagg.engines.model.architectures.base import Config, Tensor, full
from disagg.engines.model.profile import MODEL_DTYPE


def convolution(config: Config) -> LayerLayout:
    """lfm2: a short convolution."""
    return LayerLayout("state", states=(_window(config.conv_L_cache, config.hidden_size),))


def convolution_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (_rows(convolutions[0]),)


def gated_delta(config: Config) -> LayerLayout:
    """qwen3_next: a convolution over queries, keys and values, and a matrix per value head."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    matrix = (config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim)
    return LayerLayout(
        "state", states=(_window(config.linear_conv_kernel_dim, 2 * keys + values), StateTensor(matrix, "float32"))
    )


def gated_delta_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _rows(convolutions[0]), recurrent[0].transpose(-1, -2)


def kimi_delta(config: Config) -> LayerLayout:
    """kimi_linear: three convolutions, which transformers keeps as one, and a matrix per head."""
    width = config.linear_num_heads * config.linear_head_dim
    matrix = (config.linear_num_heads, config.linear_head_dim, config.linear_head_dim)
    window = _window(config.linear_conv_kernel_dim, width)
    return LayerLayout("state", states=(window, window, window, StateTensor(matrix, "float32")))


def kimi_delta_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return *_rows(convolutions[0]).chunk(3, dim=-1), recurrent[0].transpose(-1, -2)


def nemotron_mamba(config: Config) -> LayerLayout:
    """nemotron_h: Mamba 2."""
    return _mamba(
        config.conv_kernel, config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size
    )


def granite_mamba(config: Config) -> LayerLayout:
    """granitemoehybrid: Mamba 2."""
    heads, dim = config.mamba_n_heads, config.mamba_d_head
    return _mamba(config.mamba_d_conv, heads, dim, config.mamba_n_groups, config.mamba_d_state)


def falcon_hybrid(config: Config) -> LayerLayout:
    """falcon_h1: attention and Mamba 2 side by side in one layer."""
    return replace(full(config), states=granite_mamba(config).states)


def mamba_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _rows(convolutions[0]), recurrent[0]


def _mamba(kernel: int, heads: int, dim: int, groups: int, state: int) -> LayerLayout:
    window = _window(kernel, heads * dim + 2 * groups * state)
    return LayerLayout("state", states=(window, StateTensor((heads, dim, state), "float32")))


def _window(kernel: int, channels: int) -> StateTensor:
    return StateTensor((int(kernel) - 1, int(channels)), MODEL_DTYPE)


def _rows(convolution: Tensor) -> Tensor:
    return convolution[..., 1:].transpose(1, 2)
