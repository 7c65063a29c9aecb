"""gpt2, gpt_bigcode and gptj: a learned vector of each position, or rotations that transformers reads from a table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import Architecture, Config, LoadedByMLX, MLXModel, head_dim
from disagg.engines.model.profile import Rope
from disagg.engines.model.rope import reference_rope


def _rope_of_gptj(config: Config, layer: int, kind: str) -> Rope | None:
    """Its base is not in its configuration."""
    width = int(config.rotary_dim or head_dim(config))
    return reference_rope({"rope_theta": 10000.0}, width, int(config.max_position_embeddings))


def without_prefix(model_class: MLXModel) -> MLXModel:
    """mlx-lm's gpt2 Model, as a class that also takes the names that transformers writes."""

    class GPT2(model_class):
        def sanitize(self, weights: Mapping[str, Any]) -> Any:
            return super().sanitize({name.removeprefix("transformer."): array for name, array in weights.items()})

    return GPT2


ARCHITECTURES = {
    "gpt2": Architecture(mlx_model=without_prefix),
    "gptj": Architecture(rope=_rope_of_gptj),
}


def positions_of_several(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Let gpt_bigcode look up the positions of several prompts. mlx-lm 0.32 fails on several in a batch."""
    from mlx_lm.models.gpt_bigcode import GPTBigCodeModel

    models = loaded.modules(GPTBigCodeModel)
    for model in models:
        model.__class__ = _positions_of_several()
    detail = "mlx-lm fails on several prompts in one batch; set right"
    return [PreflightFinding("batches", "patched", detail)] if models else []


@cache
def _positions_of_several() -> Any:
    from mlx import core as mx
    from mlx_lm.models.base import create_attention_mask
    from mlx_lm.models.gpt_bigcode import GPTBigCodeModel

    class PositionsOfSeveral(GPTBigCodeModel):
        def __call__(self, inputs: Any, cache: Any = None) -> Any:
            hidden = self.wte(inputs)
            caches = cache or [None] * len(self.h)
            offset = mx.array(cache[0].offset if cache else 0).reshape(-1, 1)
            hidden = hidden + self.wpe(offset + mx.arange(inputs.shape[1]))
            mask = create_attention_mask(hidden, caches[0])
            for layer, kept in zip(self.h, caches, strict=True):
                hidden = layer(hidden, mask, cache=kept)
            return self.ln_f(hidden)

    return PositionsOfSeveral
