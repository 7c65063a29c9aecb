"""lfm2: layers of attention, or of a short convolution, whose last inputs they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from disagg.api.layout import LayerLayout
from disagg.engines.model.architectures.base import (
    Architecture,
    Config,
    Convolved,
    Tensor,
    convolution_rows,
    convolution_window,
)


def convolution(config: Config) -> LayerLayout:
    """A short convolution."""
    return LayerLayout("state", states=(convolution_window(config.conv_L_cache, config.hidden_size),))


def convolution_states(convolutions: Sequence[Tensor], recurrent: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (convolution_rows(convolutions[0]),)


def convolved(config: Config) -> Convolved:
    """Channels; no matrix."""
    return Convolved(((int(config.hidden_size), 1),))


def _width(config: Config) -> Mapping[str, Any]:
    return {"block_dim": config.hidden_size}


_LFM2 = Architecture(kinds={"conv": convolution}, wire_states=convolution_states, convolved=convolved)

ARCHITECTURES = {"lfm2": replace(_LFM2, mlx_arguments=_width), "lfm2_moe": _LFM2}
