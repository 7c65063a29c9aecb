"""How many bytes of KV a model makes: the one place that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

ITEMSIZE: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of a model with grouped-query attention.

    windows: per layer, tokens that attention sees; None for all, 0 for a layer whose state does not grow.
    """

    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]

    def rows(self, layer: int, tokens: int) -> int:
        """Tokens of which this layer keeps KV after a prompt of `tokens` tokens."""
        window = self.windows[layer]
        return tokens if window is None else min(tokens, window)

    def row_bytes(self, dtype: str) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * ITEMSIZE[dtype]

    def nbytes(self, tokens: int, dtype: str) -> int:
        """Bytes of KV of a prompt of this many tokens."""
        return self.row_bytes(dtype) * sum(self.rows(layer, tokens) for layer in range(len(self.windows)))


def kv_bytes_per_token(config: Mapping[str, Any], dtype: str, tokens: int) -> float | None:
    """Bytes of KV per token of a prompt of `tokens` tokens, by a model's config.json. None if it does not state
    enough, or the model has another kind of KV."""
    shape = kv_shape(config)
    return shape.nbytes(tokens, dtype) / tokens if shape and tokens > 0 else None


def kv_shape(config: Mapping[str, Any]) -> KVShape | None:
    """The KV shape in a config.json; None if it does not state enough, or the model has another kind of KV."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    layers, heads = _int(config, "num_hidden_layers"), _int(config, "num_attention_heads")
    if not layers or not heads or config.get("kv_lora_rank"):
        return None
    head_dim = _int(config, "head_dim") or (_int(config, "hidden_size") or 0) // heads
    if not head_dim:
        return None
    return KVShape(_int(config, "num_key_value_heads") or heads, head_dim, _windows(config, layers))


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window, kinds = _int(config, "sliding_window"), config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        by_kind = {"full_attention": None, "sliding_attention": window}
        return tuple(by_kind.get(kind, 0) for kind in kinds)
    return (window if config.get("model_type") == "mistral" else None,) * layers


def _int(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
