"""llama4: most layers attend within chunks of the prompt, and rotate; every fourth one attends to all tokens, and does
not.

mlx-lm keeps a chunk's rows in a cache of their own kind, which cannot be put into a batch, and computes masks and
temperatures for one position. Here every layer keeps all its rows, as on the wire, and masks and temperatures follow
the position of each prompt.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from disagg.api.status import PreflightFinding
from disagg.engines.model.architectures.base import Architecture, LoadedByMLX, MLXModel, full


def with_batches(model_class: MLXModel) -> MLXModel:
    """mlx-lm's Model as a class whose caches can be merged."""
    from mlx_lm.models.cache import KVCache

    class Batched(model_class):
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            decoder, attention = _mlx_classes()
            self.language_model.model.__class__ = decoder
            for layer in self.layers:
                layer.self_attn.__class__ = attention
                layer.self_attn.epsilon = args.text_config.rms_norm_eps

        def make_cache(self) -> list[Any]:
            return [KVCache() for _ in self.layers]

    return Batched


def batched_chunks(loaded: LoadedByMLX) -> list[PreflightFinding]:
    """Report the layers that `with_batches` has changed."""
    count = sum(isinstance(module, _mlx_classes()[1]) for module in loaded.model.modules())
    detail = f"on {count} layers mlx-lm cannot put several prompts into one batch, or has an epsilon of 1e-6; set right"
    return [PreflightFinding("chunks", "patched", detail)] if count else []


@cache
def _mlx_classes() -> tuple[Any, Any]:
    from mlx import core as mx
    from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
    from mlx_lm.models.llama4 import Attention, LlamaModel

    class Decoder(LlamaModel):
        def __call__(self, inputs: Any, cache: Any = None) -> Any:
            h = self.embed_tokens(inputs)
            caches = cache if cache is not None else [None] * len(self.layers)
            causal = create_attention_mask(h, caches[0], return_array=True)
            same = _same_chunk(caches[0], h.shape[1], self.attention_chunk_size)
            chunked = causal & same if causal is not None and same is not None else same
            for layer, one in zip(self.layers, caches, strict=True):
                h = layer(h, chunked if layer.self_attn.use_rope else causal, cache=one)
            return self.norm(h)

    class BatchedAttention(Attention):
        epsilon: float

        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            batch, length, _ = x.shape
            heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
            queries, keys, values = (
                project(x).reshape(batch, length, count, -1).transpose(0, 2, 1, 3)
                for project, count in zip((self.q_proj, self.k_proj, self.v_proj), heads, strict=True)
            )
            offset = cache.offset if cache is not None else 0
            if self.use_rope:
                queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
            elif self.attn_temperature_tuning:
                turns = mx.floor((_positions(offset, length) + 1) / self.floor_scale)
                warmer = mx.log(turns + 1.0) * self.attn_scale + 1.0
                queries = (queries * warmer[:, None, :, None]).astype(queries.dtype)
            if self.use_qk_norm:
                queries, keys = (mx.fast.rms_norm(rows, weight=None, eps=self.epsilon) for rows in (queries, keys))
            if cache is not None:
                keys, values = cache.update_and_fetch(keys, values)
            made = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
            return self.o_proj(made.transpose(0, 2, 1, 3).reshape(batch, length, -1))

    def _positions(offset: Any, length: int) -> Any:
        """The positions of the next tokens of each prompt, [prompts or 1, length]."""
        return mx.array(offset).reshape(-1, 1) + mx.arange(length)

    def _same_chunk(cache: Any, length: int, chunk: int) -> Any:
        """Which rows are in the chunk of each new token, [prompts or 1, 1, length, rows]; None for single tokens at
        places of their own, as an audit has them."""
        offset = cache.offset if cache is not None else 0
        end = getattr(cache, "_idx", offset)  # of a batch, whose rows are padded in front
        if not isinstance(end, int):
            return None
        rows = _positions(mx.array(offset) - end, end + length) // chunk
        return rows[:, None, None, :] == rows[:, None, -length:, None]

    return Decoder, BatchedAttention


ARCHITECTURES = {
    "llama4_text": Architecture(kinds={"chunked_attention": full}),
    "llama4": Architecture(mlx_model=with_batches),
}
