"""One teacher-forced pass outside the batch, for `verify`. Runs on the engine's thread."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from disagg.engines.mlx import cache as mlx_cache
from disagg.kv.received import ReceivedKV


def logits(model: Any, tokens: list[int], last: int, kv: ReceivedKV | None, chunk_tokens: int) -> list[list[float]]:
    """Logits [last, vocab] after each of the final `last` tokens. `kv` covers tokens[:-last]."""
    caches = make_prompt_cache(model) if kv is None else mlx_cache.build(model, kv)
    first = len(tokens) - last
    for start in range(first if kv else 0, first, chunk_tokens):
        model(mx.array([tokens[start : min(start + chunk_tokens, first)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    answer: list[list[float]] = model(mx.array([tokens[first:]]), cache=caches)[0].astype(mx.float32).tolist()
    return answer
