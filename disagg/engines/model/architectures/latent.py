"""Latent attention (MLA): a layer keeps one latent vector and one rotated vector per token, shared by all heads.

They travel as the keys and the values of one head. transformers keeps the halves of the rotated pairs apart, mlx-lm
keeps each pair together.
"""

from __future__ import annotations

from disagg.api.layout import LayerLayout
from disagg.engines.model.architectures.base import Config, Tensor
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
