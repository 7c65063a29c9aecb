"""What each architecture keeps between tokens, by transformers' name of the text model (`model_type`).

base      an architecture, and plain attention, which needs no entry here
states    layers that keep a state: convolutions, gated delta nets, Mamba 2
latent    latent attention
vllm      what vLLM alone computes otherwise
verified  which of all architectures disagg itself was run with

docs/architectures.md describes how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from disagg.engines.model.architectures import latent, states
from disagg.engines.model.architectures.base import Architecture, layer_kinds, no_rope, plain_rope
from disagg.engines.model.profile import Rope

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of"]


def _rope_on_sliding_layers(config: Any, layer: int, kind: str) -> Rope | None:
    """Rotary embedding on sliding layers only, which the configuration does not state."""
    if config.sliding_window is not None and kind == "full_attention":
        return None
    return plain_rope(config, layer, kind)


def _rotated_halves(config: Any) -> str:
    return "" if config.rope_interleave else "mlx-lm ignores rope_interleave, which transformers applies"


_GATED_DELTA = Architecture(kinds={"linear_attention": states.gated_delta}, wire_states=states.gated_delta_states)
_CONVOLUTION = Architecture(kinds={"conv": states.convolution}, wire_states=states.convolution_states)
_LATENT = Architecture(
    kinds={"full_attention": latent.latent},
    rope=latent.latent_rope,
    wire_values=latent.pairs_together,
    refusal=_rotated_halves,
)


def _refused(reason: str) -> Architecture:
    return Architecture(refusal=lambda config: reason)


_LATENT_REFUSED = _refused("its form of latent attention (MLA) is not handed over")
_EXPANDED = _refused("transformers keeps its latent vectors, mlx-lm the keys and values of every head")
_INDEXED = _refused("its sparse attention keeps keys of its own beside the latent vectors, which are not handed over")


def _rope_if_stated(config: Any, layer: int, kind: str) -> Rope | None:
    return plain_rope(config, layer, kind) if config.position_embedding_type == "rope" else None


def _grouped_norm(config: Any) -> str:
    several = "linear_attention" in layer_kinds(config) and config.mamba_n_groups > 1
    return "mlx-lm normalises all groups of a Mamba layer together, transformers each" if several else ""


def _unnormalised_experts(config: Any) -> str:
    return "mlx-lm ignores norm_topk_prob, which transformers applies" if config.norm_topk_prob else ""


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "cohere2": Architecture(rope=_rope_on_sliding_layers),
    "exaone4": Architecture(rope=_rope_on_sliding_layers),
    "exaone_moe": Architecture(rope=_rope_on_sliding_layers),
    "afmoe": Architecture(rope=_rope_on_sliding_layers),
    "qwen3_next": _GATED_DELTA,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "kimi_linear": Architecture(
        kinds={"linear_attention": states.kimi_delta, "full_attention": latent.latent},
        rope=no_rope,
        wire_states=states.kimi_delta_states,
    ),
    "nemotron_h": Architecture(
        kinds={"linear_attention": states.nemotron_mamba}, rope=no_rope, wire_states=states.mamba_states
    ),
    "falcon_h1": Architecture(kinds={"hybrid": states.falcon_hybrid}, wire_states=states.mamba_states),
    "qwen2_moe": Architecture(refusal=_unnormalised_experts),
    "granitemoehybrid": Architecture(
        kinds={"linear_attention": states.granite_mamba},
        rope=_rope_if_stated,
        wire_states=states.mamba_states,
        refusal=_grouped_norm,
    ),
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "deepseek_v2": _EXPANDED,
    "minicpm3": _EXPANDED,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "longcat_flash": _refused("each of its layers keeps latent vectors twice, which are not handed over"),
    "bailing_hybrid": _refused("its layers of linear attention are not handed over"),
    "gpt2": _refused("it adds a learned vector of each position to its inputs, which disagg cannot compare"),
    "gpt_bigcode": _refused("mlx-lm fails on several prompts in one batch: it computes the positions of one"),
    "gptj": _refused(
        "transformers has a table of its rotary angles in place of frequencies, which disagg does not read"
    ),
    "llama4_text": _refused("mlx-lm cannot put several prompts into one batch: its ChunkedKVCache cannot be merged"),
}
"""The architectures that are not plain attention as their configuration states it."""

_PLAIN: Final = Architecture()


def architecture_of(config: Any) -> Architecture:
    """The architecture of transformers' configuration of a text model."""
    known = ARCHITECTURES.get(str(config.model_type))
    if known is not None:
        return known
    return _LATENT_REFUSED if getattr(config, "kv_lora_rank", None) else _PLAIN
