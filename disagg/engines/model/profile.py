"""What a framework computes for a model, as values that two hosts can compare.

The *reference* profile comes from the checkpoint's files alone (transformers' config classes, which need no torch);
each engine also measures an *actual* profile from its loaded modules. `preflight` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.api.layout import LayerLayout


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of one layer. inv_freq: radians per token, one per rotated pair, fastest first.
    scale: factor of cos and sin (YaRN's attention factor), 1.0 for other ropes."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer: its cache layout and its rotary embedding (None if it has none)."""

    layout: LayerLayout
    rope: Rope | None


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model as one framework computes it or as the checkpoint's files describe it.

    source: "checkpoint", "transformers", "vllm", "mlx-lm" or "simulated".
    """

    source: str
    architecture: str
    vocab_size: int
    context: int
    layers: tuple[LayerProfile, ...]
    tokenizer: str  # short hash
    chat_template: str  # short hash
    special_tokens: str  # short hash
    eos_ids: frozenset[int]
