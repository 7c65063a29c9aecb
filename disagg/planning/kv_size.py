"""How much KV a model makes per token, from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str, tokens: int) -> float | None:
    """Bytes of KV per token of a prompt of `tokens` tokens: sliding layers keep their window only, layers without
    attention nothing that grows. None where the configuration does not tell, or the model keeps another kind of KV."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    layers, heads = _int(config, "num_hidden_layers"), _int(config, "num_attention_heads")
    if not layers or not heads or tokens < 1 or config.get("kv_lora_rank"):
        return None
    kv_heads = _int(config, "num_key_value_heads") or heads
    head = _int(config, "head_dim") or (_int(config, "hidden_size") or 0) // heads
    if not head:
        return None
    per_row = 2 * kv_heads * head * _BYTES.get(dtype, 2)
    window = _int(config, "sliding_window") or tokens
    kinds = config.get("layer_types")
    kinds = list(kinds) if isinstance(kinds, list) and len(kinds) == layers else ["full_attention"] * layers
    rows = {"full_attention": tokens, "sliding_attention": min(window, tokens)}
    return sum(rows.get(kind, 0) for kind in kinds) * per_row / tokens


def _int(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
