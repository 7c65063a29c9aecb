"""Latent attention (MLA): a layer keeps one latent vector and one rotated vector per token, shared by all heads.

They travel as the keys and the values of one head. transformers keeps the halves of the rotated pairs apart, mlx-lm
keeps each pair together.
"""

from __future__ import annotations

from dataclasses import replace

from disagg.api.layout import LayerLayout
from disagg.engines.model.architectures.base import Architecture, Config, Tensor, refused
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


def _rotated_halves(config: Config) -> str:
    return "" if config.rope_interleave else "mlx-lm ignores rope_interleave, which transformers applies"


_LATENT = Architecture(
    kinds={"full_attention": latent},
    rope=latent_rope,
    wire_values=pairs_together,
    refusal=_rotated_halves,
)
_EXPANDED = refused("transformers keeps its latent vectors, mlx-lm the keys and values of every head")
_INDEXED = refused("its sparse attention keeps keys of its own beside the latent vectors, which are not handed over")

ARCHITECTURES = {
    "deepseek_v3": replace(_LATENT, latent_epsilon=lambda config: 1e-6),  # as transformers, whatever config.json has
    "glm4_moe_lite": _LATENT,
    "deepseek_v2": _EXPANDED,
    "minicpm3": _EXPANDED,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "longcat_flash": refused("each of its layers keeps latent vectors twice, which are not handed over"),
}
UNKNOWN = refused("its form of latent attention (MLA) is not handed over")
"""A model type with latent vectors that has no entry."""
