"""What each architecture keeps between tokens, and what is special about it in any framework, by transformers' name of
the text model (`model_type`). Frameworks are imported by what runs in them, and not before.

base      an architecture, and plain attention, which needs no entry here
lfm2      layers of a short convolution
delta     gated delta nets: qwen3_next, qwen3_5, kimi_linear
mamba     Mamba 2: nemotron_h, falcon_h1, granitemoehybrid
latent    latent attention: deepseek, glm4_moe_lite
indexed   sparse attention: deepseek_v32, glm_moe_dsa
llama4    attention within chunks of the prompt
cohere    rotation on sliding layers only: cohere2, exaone4, afmoe
gemma     streams beside the hidden state: gemma3n
experts   mixtures that a framework computes otherwise: qwen2_moe, olmoe, ernie4_5_moe
gpt_oss   its experts, and its YaRN
verified  which of all architectures disagg itself was run with

docs/architectures.md describes how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from disagg.engines.model.architectures import (
    cohere,
    delta,
    experts,
    gemma,
    gpt_oss,
    indexed,
    latent,
    lfm2,
    llama4,
    mamba,
)
from disagg.engines.model.architectures.base import Architecture, LoadedByMLX, Patch, refused
from disagg.engines.model.profile import LayerProfile
from disagg.errors import ModelError

__all__ = ["ARCHITECTURES", "MLX_PATCHES", "Architecture", "LoadedByMLX", "Patch", "architecture_of", "layers_of"]

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    **lfm2.ARCHITECTURES,
    **delta.ARCHITECTURES,
    **mamba.ARCHITECTURES,
    **latent.ARCHITECTURES,
    **indexed.ARCHITECTURES,
    **llama4.ARCHITECTURES,
    **cohere.ARCHITECTURES,
    **gemma.ARCHITECTURES,
    **experts.ARCHITECTURES,
    **gpt_oss.ARCHITECTURES,
    "bailing_hybrid": refused("its layers of linear attention are not handed over"),
    "gpt2": refused("it adds a learned vector of each position to its inputs, which disagg cannot compare"),
    "gpt_bigcode": refused("mlx-lm fails on several prompts in one batch: it computes the positions of one"),
    "gptj": refused(
        "transformers has a table of its rotary angles in place of frequencies, which disagg does not read"
    ),
}
"""The architectures that are not plain attention as their configuration states it, or special in a framework."""
MLX_PATCHES: Final[tuple[Patch, ...]] = (
    gpt_oss.untruncated_yarn,
    mamba.lengths_of_mamba,
    mamba.unlimited_time_steps,
    experts.biased_experts,
    indexed.indexer_norms,
    latent.kept_latents,
    llama4.batched_chunks,
)

_PLAIN: Final = Architecture()


def architecture_of(config: Any) -> Architecture:
    """The architecture of transformers' configuration of a text model."""
    unknown = latent.UNKNOWN if getattr(config, "kv_lora_rank", None) else _PLAIN
    return ARCHITECTURES.get(str(config.model_type), unknown)


def layers_of(config: Any, folder: Path) -> tuple[LayerProfile, ...]:
    """The layers of the model in this folder, by transformers' configuration. ModelError, with the reason, if its KV
    cannot be handed over."""

    def cannot_be_served(reason: str) -> ModelError:
        message = f"{folder}: model type {config.model_type!r} cannot be served: {reason}"
        return ModelError(message, "use another model")

    architecture = architecture_of(config)
    reasons = {
        "it is not a decoder alone": getattr(config, "is_encoder_decoder", False),
        "it has no attention layers of a known form": not hasattr(config, "num_attention_heads"),
        "its attention is bidirectional": getattr(config, "use_bidirectional_attention", None) in (True, "all"),
        (refusal := architecture.refusal(config) or experts.single_expert(config)): refusal,
    }
    if reason := next((reason for reason, applies in reasons.items() if applies), ""):
        raise cannot_be_served(reason)
    try:
        layers = architecture.layers(config)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise cannot_be_served(f"its configuration is of an unknown form: {error}") from error
    if not any(layer.layout.kv_heads for layer in layers):
        raise cannot_be_served("no layer of it has attention, and its KV no tokens")
    return layers


def mlx_model(model_type: str, model: Any) -> Any:
    """mlx-lm's Model of this type as a class that also loads what mlx-lm misreads."""
    return ARCHITECTURES.get(model_type, _PLAIN).mlx_model(model)
