"""gpt2, gpt_bigcode and gptj: a learned vector of each position, or rotations that transformers reads from a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from disagg.api.layout import LayerLayout
from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import (
    Architecture,
    Config,
    LoadedByMLX,
    MLXModel,
    full,
    head_dim,
    no_rope,
)
from disagg.engines.model.profile import Rope
from disagg.engines.model.rope import reference_rope


def _rope_of_gptj(config: Config, layer: int, kind: str) -> Rope | None:
    """Its base is not in its configuration."""
    width = int(config.rotary_dim or head_dim(config))
    return reference_rope({"rope_theta": 10000.0}, width, int(config.max_position_embeddings))


def _one_head_or_all(config: Config) -> LayerLayout:
    """Whatever num_key_value_heads is."""
    return replace(full(config), kv_heads=1 if config.multi_query else int(config.num_attention_heads))


def without_prefix(model_class: MLXModel) -> MLXModel:
    """mlx-lm's gpt2 Model, as a class that also takes the names that transformers writes."""

    class GPT2(model_class):
        def sanitize(self, weights: Mapping[str, Any]) -> Any:
            return super().sanitize({name.removeprefix("transformer."): array for name, array in weights.items()})

    return GPT2


def with_heads_apart(model_class: MLXModel) -> MLXModel:
    """mlx-lm's gpt_bigcode Model, as a class that splits what one projection computes into queries, keys and values as
    transformers does if there is not only one head of keys: head by head."""
    from mlx import core as mx

    class GPTBigCode(model_class):
        def sanitize(self, weights: Mapping[str, Any]) -> Any:
            def ordered(name: str, array: Any) -> Any:
                if self.args.multi_query or ".c_attn." not in name:
                    return array
                return mx.contiguous(mx.unflatten(array, 0, (self.args.n_head, 3, -1)).swapaxes(0, 1).flatten(0, 2))

            weights = {name: ordered(name, array) for name, array in weights.items()}
            return super().sanitize(weights) if hasattr(model_class, "sanitize") else weights

    return GPTBigCode


ARCHITECTURES = {
    "gpt2": Architecture(rope=no_rope, mlx_model=without_prefix),
    "gpt_bigcode": Architecture(kinds={"full_attention": _one_head_or_all}, rope=no_rope, mlx_model=with_heads_apart),
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
