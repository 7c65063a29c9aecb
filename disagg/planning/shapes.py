"""What a model costs: parameters that a token is multiplied with, bytes of weights and KV.

The known shapes are taken from the models' config.json files; `checkpoint.file_size` reads one from such a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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


def _every_fourth(layers: int) -> tuple[int | None, ...]:
    """The layers of Qwen3-Next: three with a state, then one of full attention."""
    return tuple(None if layer % 4 == 3 else 0 for layer in range(layers))


def _alternating(layers: int, window: int) -> tuple[int | None, ...]:
    """The layers of gpt-oss: sliding and full attention alternate."""
    return tuple(window if layer % 2 == 0 else None for layer in range(layers))


# 8.5 bits: int8 in groups of 64 with a float16 scale and bias each. 4.25: MXFP4, one 8-bit scale for 32 weights.
SHAPES: Final[Mapping[str, ModelShape]] = {
    entry.name: entry
    for entry in (
        ModelShape("llama-3.1-8b", 4096, 32, 8, 128, 128256, (None,) * 32, feed_forward=14336),
        ModelShape("llama-3.3-70b", 8192, 64, 8, 128, 128256, (None,) * 80, feed_forward=28672, weight_bits=8.5),
        ModelShape("qwen3-8b", 4096, 32, 8, 128, 151936, (None,) * 36, feed_forward=12288, context=40960),
        ModelShape(
            "qwen3-coder-30b",
            *(2048, 32, 4, 128, 151936, (None,) * 48),
            experts=128,
            experts_per_token=8,
            expert_width=768,
            weight_bits=8.5,
            expert_bits=8.5,
            context=262144,
            hub_ids=("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3-30B-A3B"),
        ),
        ModelShape(
            "qwen3-next-80b",
            *(2048, 16, 2, 256, 151936, _every_fourth(48)),
            # 32 matrices of 128 x 128 in float32, and three inputs of a convolution over 8,192 channels
            states=(StateTensor((32, 128, 128)), StateTensor((3, 8192), "bfloat16")),
            state_params=2048 * (2 * 2048 + 2 * 4096 + 64) + 4096 * 2048,
            gated=True,
            feed_forward=512,
            experts=512,
            experts_per_token=10,
            expert_width=512,
            weight_bits=8.5,
            expert_bits=8.5,
            context=262144,
            hub_ids=("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking"),
        ),
        ModelShape(
            "gpt-oss-120b",
            *(2880, 64, 8, 64, 201088, _alternating(36, 128)),
            experts=128,
            experts_per_token=4,
            expert_width=2880,
            weight_bits=8.5,
            expert_bits=4.25,
        ),
        ModelShape(
            "gpt-oss-20b",
            *(2880, 64, 8, 64, 201088, _alternating(24, 128)),
            experts=32,
            experts_per_token=4,
            expert_width=2880,
            weight_bits=8.5,
            expert_bits=4.25,
        ),
    )
}
