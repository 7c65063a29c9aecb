"""How many bytes of KV a model makes: the one place that computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from disagg.api.names import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of a model with grouped-query attention, or latent attention.

    windows: per layer, tokens that attention sees; None for all, 0 for a layer whose state does not grow.
    state_bytes: of one such layer's state. latent: values per token that latent attention keeps instead of keys and
    values; 0 without it.
    """

    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    state_bytes: int = 0
    latent: int = 0

    def rows(self, layer: int, tokens: int) -> int:
        """Tokens of which this layer keeps KV after a prompt of `tokens` tokens."""
        window = self.windows[layer]
        return tokens if window is None else min(tokens, window)

    def row_bytes(self, dtype: str) -> int:
        """Bytes of one token's keys and values in one layer."""
        return (self.latent or 2 * self.kv_heads * self.head_dim) * DTYPE_BYTES[dtype]

    @property
    def states_bytes(self) -> int:
        """Bytes of all layers' states."""
        return self.windows.count(0) * self.state_bytes

    def nbytes(self, tokens: int, dtype: str) -> int:
        """Bytes of KV of a prompt of this many tokens, its states included."""
        rows = sum(self.rows(layer, tokens) for layer in range(len(self.windows)))
        return self.row_bytes(dtype) * rows + (self.states_bytes if tokens else 0)


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
    if not layers or not heads:
        return None
    windows, latent = _windows(config, layers), 0
    if 0 not in windows and _has_states(config):  # which layers have one is stated in a form of this model type only
        return None
    if lora := _int(config, "kv_lora_rank"):
        latent = lora + (_int(config, "qk_rope_head_dim") or 0)
    head_dim = _int(config, "head_dim") or (_int(config, "hidden_size") or 0) // heads
    state = _state_bytes(config) if 0 in windows else 0
    if not head_dim or state is None:
        return None
    return KVShape(_int(config, "num_key_value_heads") or heads, head_dim, windows, state, latent)


def _has_states(config: Mapping[str, Any]) -> bool:
    """Whether some layers keep a state: a delta net, a short convolution, Mamba."""
    return any(config.get(key) for key in config if key in _OF_STATES or key.startswith("mamba_"))


_OF_STATES: Final = ("linear_attn_config", "hybrid_override_pattern", "conv_L_cache")


def _state_bytes(config: Mapping[str, Any]) -> int | None:
    """Bytes of the state of one layer: of a gated delta net a float32 matrix per value head and a convolution's last
    inputs, counted in 16 bits; of a short convolution only these. None for other kinds."""
    if kernel := _int(config, "conv_L_cache"):
        return (kernel - 1) * (_int(config, "hidden_size") or 0) * DTYPE_BYTES["bfloat16"]
    keys, values, key_dim, value_dim, kernel = (_int(config, f"linear_{name}") for name in _DELTA)
    if not keys or not values or not key_dim or not value_dim or not kernel:
        return None
    inputs = 2 * keys * key_dim + values * value_dim
    return values * key_dim * value_dim * DTYPE_BYTES["float32"] + (kernel - 1) * inputs * DTYPE_BYTES["bfloat16"]


_DELTA: Final = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window, kinds = _int(config, "sliding_window"), config.get("layer_types")
    interval = _int(config, "full_attention_interval")
    if not kinds and interval and config.get("linear_num_value_heads"):  # as on the hub, without layer_types
        return tuple(None if (layer + 1) % interval == 0 else 0 for layer in range(layers))
    if isinstance(kinds, list) and len(kinds) == layers:
        by_kind = {"full_attention": None, "sliding_attention": window}
        return tuple(by_kind.get(kind, 0) for kind in kinds)
    return (window if config.get("model_type") == "mistral" else None,) * layers


def _int(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
