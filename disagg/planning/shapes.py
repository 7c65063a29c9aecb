"""What a model costs: parameters that a token is multiplied with, bytes of weights and KV.

The known shapes, in shapes.toml, are taken from the models' config.json files; `checkpoint.file_size` reads one from
such a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import tomli

from disagg.api.layout import Layout, StateTensor, uniform
from disagg.errors import UsageError

GATED = 3  # matrices of one gated feed-forward block: gate, up, down


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated feed-forward blocks, dense or a mixture of experts.

    windows: per layer, tokens that attention sees; None for all, 0 for a layer with a state instead of attention.
    states, state_params: such a layer's state, and the parameters of its projections. gated: whether queries come with
    a gate of their size. feed_forward: width of the dense block or of the shared expert, 0 if there is none. experts,
    experts_per_token, expert_width: of the mixture in every layer. weight_bits, expert_bits: bits per parameter as
    served, scales included. head_bits: of embeddings and output head; None for weight_bits.
    context: tokens the model was trained for.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    windows: tuple[int | None, ...]
    states: tuple[StateTensor, ...] = ()
    state_params: int = 0
    gated: bool = False
    feed_forward: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    tied: bool = False
    weight_bits: float = 16.0
    expert_bits: float = 16.0
    head_bits: float | None = None
    context: int = 131072
    hub_ids: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def qkv_params(self) -> int:
        """Parameters of one layer's query, key and value projections."""
        return self.hidden * self.head_dim * (self.heads * (2 if self.gated else 1) + 2 * self.kv_heads)

    @property
    def dense_params(self) -> int:
        """Parameters of one layer that every token is multiplied with: attention, router, dense feed-forward. The mean
        of all layers, if some have a state instead of attention."""
        attention = self.qkv_params + self.hidden * self.head_dim * self.heads
        states = self.windows.count(0)
        mixing = (attention * (self.layers - states) + self.state_params * states) // self.layers
        return mixing + self.hidden * self.experts + GATED * self.hidden * self.feed_forward

    @property
    def expert_params(self) -> int:
        """Parameters of one expert of one layer."""
        return GATED * self.hidden * self.expert_width

    @property
    def head_params(self) -> int:
        """Parameters of the output head, used only for tokens whose logits are computed."""
        return self.hidden * self.vocab

    @property
    def total_params(self) -> int:
        """Parameters of all matrices, without norms and biases."""
        per_layer = self.dense_params + self.experts * self.expert_params
        return self.layers * per_layer + self.head_params * (1 if self.tied else 2)

    @property
    def active_params(self) -> int:
        """Parameters that one decoded token is multiplied with."""
        per_layer = self.dense_params + self.experts_per_token * self.expert_params
        return self.layers * per_layer + self.head_params

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights as served."""
        experts = self.layers * self.experts * self.expert_params
        tables = self.head_params * (1 if self.tied else 2)
        layers = self.total_params - experts - tables
        return (layers * self.weight_bits + experts * self.expert_bits + tables * self.table_bits) / 8

    @property
    def table_bits(self) -> float:
        """Bits per parameter of embeddings and output head."""
        return self.weight_bits if self.head_bits is None else self.head_bits

    def first(self, layers: int) -> ModelShape:
        """Its first layers with the embedding, and without the output head."""
        return replace(self, windows=self.windows[:layers], tied=True)

    def layout(self, dtype: str) -> Layout:
        """The layout of its KV."""
        return uniform(self.windows, self.kv_heads, self.head_dim, dtype, states=self.states)

    def distinct_experts(self, tokens: float) -> float:
        """Expected number of experts of a layer that these tokens use, if each chooses at random."""
        if not self.experts:
            return 0.0
        missed: float = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.experts * (1.0 - missed)


def shape(name: str) -> ModelShape:
    """The shape of this name. Raises UsageError, which lists the known ones."""
    if name in SHAPES:
        return SHAPES[name]
    raise UsageError(f"unknown model shape {name!r}", f"known: {', '.join(SHAPES)}")


def matching(*labels: str) -> ModelShape | None:
    """The known shape whose name is in one of these labels (model names, hub ids, folder names); None if none is."""
    for label in labels:
        words = _plain(label)
        for known in SHAPES.values():
            if any(_plain(name) in words for name in (known.name, *(hub.split("/")[-1] for hub in known.hub_ids))):
                return known
    return None


def _plain(label: str) -> str:
    """Lower-case letters and digits only: `Qwen3-Coder-30B` and `qwen3-coder:30b` become equal."""
    return re.sub(r"[^a-z0-9]", "", label.lower())


def _read(text: str) -> dict[str, ModelShape]:
    """The shapes of a file, whose layers repeat a pattern of kinds."""
    return {name: _shape(name, table) for name, table in tomli.loads(text).items()}


def _shape(name: str, table: dict[str, Any]) -> ModelShape:
    layers, pattern = table.pop("layers"), table.pop("pattern", ["full"])
    kinds = {"full": None, "state": 0, "sliding": table.pop("window", None)}
    windows = tuple(kinds[pattern[layer % len(pattern)]] for layer in range(layers))
    states = tuple(StateTensor(tuple(one.pop("shape")), **one) for one in table.pop("states", ()))
    hub_ids = tuple(table.pop("hub_ids", ()))
    return ModelShape(name, windows=windows, states=states, hub_ids=hub_ids, **table)


SHAPES: Final[Mapping[str, ModelShape]] = _read(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
