"""What a way to move a KV cache is: two ends, one on each host. `kv` is what every way moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from disagg.kv.layout import Layout
from disagg.kv.placement import Placement

CHUNK_TOKENS = 2048  # a chunked prefill's blocks
PATIENCE_S = 60.0  # for any single step of the other end


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV of `tokens` tokens of one model."""

    layout: Layout
    tokens: int

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes(self.tokens)

    @property
    def placement(self) -> Placement:
        return Placement.of(self.layout, self.tokens)


class Source:
    """KV as a prefill engine holds it: per layer keys and values, [1, kv_heads, rows, head_dim], of random bits."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        layout = shape.layout
        dtype = getattr(torch, layout.dtype)
        torch.manual_seed(0)
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in layout.layers:
            sizes = [(1, layer.kv_heads, len(layer.rows(shape.tokens)), d) for d in (layer.key_dim, layer.value_dim)]
            keys, values = (torch.rand(size, dtype=torch.float32).to(dtype).to(device) for size in sizes)
            self.tensors.append((keys, values))

    def flat(self) -> list[Any]:
        """Every tensor's bytes in CPU memory, keys and values in turn: uint8 arrays, views where it lies there."""
        return [tensor.cpu().view(torch.uint8).numpy().reshape(-1) for pair in self.tensors for tensor in pair]


class Sender(Protocol):
    """The prefill host's end."""

    def prepare(self, offer: dict[str, Any]) -> None:
        """Untimed: connect to what the receiver offers."""

    def send(self) -> None:
        """Timed: move all of it."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The decode host's end."""

    def offer(self) -> dict[str, Any]:
        """Untimed: what the sender must know."""

    def accept(self) -> None:
        """Untimed: the sender has prepared itself."""

    def receive(self) -> Sequence[Any]:
        """Timed: take all of it; every tensor's bytes as ready for the decode engine, keys and values in turn."""

    def close(self) -> None: ...
