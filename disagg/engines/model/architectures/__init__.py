"""What each architecture keeps between tokens, and what is special about it in any framework, by transformers' name of
the text model (`model_type`). Frameworks are imported by what runs in them, and not before.

base         an architecture, and plain attention, which needs no entry here
lfm2         layers of a short convolution
delta        gated delta nets: qwen3_next, qwen3_5, kimi_linear, bailing_hybrid, olmo_hybrid
mamba        Mamba: mamba, falcon_mamba, jamba; Mamba 2: mamba2, nemotron_h, falcon_h1, granitemoehybrid
latent       latent attention: deepseek, glm4_moe_lite
indexed      sparse attention: deepseek_v32, glm_moe_dsa
llama4       attention within chunks of the prompt
cohere       rotation on sliding layers only, or twice the heads: cohere2, exaone4, afmoe, mimo_v2_flash
gemma        gemma2's masks; streams beside the hidden state: gemma3n; norms of gemma, gemma2 and gemma3
experts      mixtures that a framework misreads: gpt_oss, qwen2_moe, olmoe, ernie4_5_moe, jamba
activations  activation functions
gpt          positions as learned vectors, or rotations from a table: gpt2, gpt_bigcode, gptj
olmo         norms without weights, clipped projections: olmo, olmoe
weights      output heads and biases that a framework does not take as the checkpoint has them
plain        windows and rotary embeddings that mlx-lm leaves out
patches      the table of all patches

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
    gpt,
    indexed,
    latent,
    lfm2,
    llama4,
    mamba,
    olmo,
)
from disagg.engines.model.architectures.base import Architecture
from disagg.engines.model.architectures.experts import BIASES
from disagg.engines.model.profile import LayerProfile
from disagg.errors import ModelError
from disagg.planning.refusals import refusal

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "layers_of"]

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
    **gpt.ARCHITECTURES,
    **olmo.ARCHITECTURES,
}
"""The architectures that are not plain attention as their configuration states it, or special in a framework."""
_PLAIN: Final = Architecture()


def architecture_of(config: Any) -> Architecture:
    """The architecture of transformers' configuration of a text model."""
    return ARCHITECTURES.get(str(config.model_type), _PLAIN)


def layers_of(config: Any, folder: Path, whole: str = "") -> tuple[LayerProfile, ...]:
    """The layers of the model in this folder, by transformers' configuration. whole: the model type of config.json, of
    which this is the part that reads text. ModelError, with the reason, if its KV cannot be handed over."""

    def cannot_be_served(reason: str) -> ModelError:
        message = f"{folder}: model type {config.model_type!r} cannot be served: {reason}"
        return ModelError(message, "use another model")

    architecture = architecture_of(config)
    try:
        if reason := refusal(config, type(config), whole):
            raise cannot_be_served(reason)
        if not (architecture.kinds or hasattr(config, "num_attention_heads")):
            raise cannot_be_served("it has no layers of a known form")
        layers = architecture.layers(config)
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise cannot_be_served(f"its configuration is of an unknown form: {error}") from error
    if not layers:
        raise cannot_be_served("none of its layers keeps anything between tokens")
    return layers


def float32_weights(model_type: str) -> tuple[str, ...]:
    """Endings of the weights that mlx-lm's model keeps in float32 whatever its dtype: the biases by which experts are
    chosen, since rounded ones choose others, and what transformers keeps."""
    return (*BIASES, *ARCHITECTURES.get(model_type, _PLAIN).float32)


def mlx_module(model_type: str) -> str:
    """The name of mlx-lm's module that computes a model of this type."""
    return ARCHITECTURES.get(model_type, _PLAIN).mlx_module or model_type


def mlx_model(model_type: str, model: Any) -> Any:
    """mlx-lm's Model of this type as a class that also loads what mlx-lm misreads."""
    return ARCHITECTURES.get(model_type, _PLAIN).mlx_model(model)
