"""gemma2, whose attention mlx-lm computes itself, and gemma3n: several streams beside the hidden state. And norms whose
weights are stored without the 1 that is added to them, and gemma3's embeddings, which are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import Architecture, Config, LoadedByMLX


def _several_streams(config: Config) -> str:
    return f"its layers pass on {config.altup_num_inputs} hidden states per token"


def _without_inputs_per_layer(config: Config) -> Mapping[str, Any]:
    """mlx-lm reads gemma4_unified as gemma4, which has inputs of each layer by default; transformers follows the widths
    of each layer."""
    full = config.per_layer_config[list(config.layer_types).index("full_attention")]
    return {
        "hidden_size_per_layer_input": 0,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_key_value_heads,
    }


ARCHITECTURES = {
    "gemma4_unified_text": Architecture(mlx_arguments=_without_inputs_per_layer),
    "gemma3n_text": Architecture(split=_several_streams),
}


def unrounded_norms(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Normalise with 1 + weight in float32, as transformers, vLLM and the models' own code do. mlx-lm 0.32 rounds the
    sum to the model's dtype. Of six tiny gemma3 models in bfloat16 the mean divergence from float32 was 0.027 with
    rounded sums and 0.019 without; that of transformers was 0.016."""
    from mlx import core as mx
    from mlx_lm.models import gemma, gemma2, gemma3_text

    norms = [one for module in (gemma, gemma2, gemma3_text) for one in loaded.modules(module.RMSNorm)]
    rounded = [norm for norm in norms if norm.weight.dtype != mx.float32]
    for norm in rounded:
        norm.weight = 1.0 + norm.weight.astype(mx.float32)
        norm.__class__ = _norm_in_float32()
    detail = f"mlx-lm rounds 1 + weight of {len(rounded)} norms; float32 here"
    return [PreflightFinding("norms", "patched", detail)] if rounded else []


@cache
def _norm_in_float32() -> Any:
    from mlx import core as mx
    from mlx import nn

    class NormInFloat32(nn.Module):
        """Its weight has the 1 in it."""

        def __call__(self, x: Any) -> Any:
            return mx.fast.rms_norm(x, self.weight, self.eps).astype(x.dtype)

    return NormInFloat32


def unrounded_scales(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Multiply gemma3's embeddings by the root of the width in the dtype of the model, as transformers and vLLM do.
    mlx-lm 0.32 rounds the root to bfloat16 in every dtype: by 0.17 % for a width of 1,152."""
    from mlx import core as mx
    from mlx_lm.models.gemma3_text import Gemma3Model

    found = []
    for model in loaded.modules(Gemma3Model):
        embeddings, root = model.embed_tokens, model.args.hidden_size**0.5
        kind: Any = type(embeddings)
        dtype = embeddings.get("scales", embeddings.weight).dtype
        rounded = mx.array(root, mx.bfloat16).astype(dtype)
        if rounded.item() != mx.array(root, dtype).item():
            embeddings.factor = root / rounded.item()
            embeddings.__class__ = _embeddings_with_factor(kind)
            detail = f"mlx-lm multiplies them by {rounded.item():g} in place of {root:.6g}; set right"
            found.append(PreflightFinding("embeddings", "patched", detail))
    return found


@cache
def _embeddings_with_factor(kind: Any) -> Any:
    class EmbeddingsWithFactor(kind):
        def __call__(self, x: Any) -> Any:
            return super().__call__(x) * self.factor

    return EmbeddingsWithFactor


def masks_of_several(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Let gemma2's attention take the masks of several prompts. Its scores have a dimension more than these: query
    heads that share keys. mlx-lm 0.32 fails in every batch of several prompts."""
    from mlx_lm.models.gemma2 import Attention

    attentions = [module for module in loaded.modules(Attention) if module.repeats > 1]
    for attention in attentions:
        attention.__class__ = _attention_of_several()
    detail = f"on {len(attentions)} layers mlx-lm fails on several prompts in one batch; set right"
    return [PreflightFinding("batches", "patched", detail)] if attentions else []


@cache
def _attention_of_several() -> Any:
    from mlx_lm.models.gemma2 import Attention

    class AttentionOfSeveral(Attention):
        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            several = mask is not None and mask.ndim == 4
            return super().__call__(x, mask[:, :, None] if several else mask, cache)

    return AttentionOfSeveral
