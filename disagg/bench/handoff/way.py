"""What a way to move a KV cache is: two ends, one on each host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from disagg.kv.layout import Layout

PATIENCE_S = 60.0  # for any single step of the other end
LOADING_S = 120.0  # for its frameworks, on a cold disk
LONG_S = 600.0  # for a whole turn of the slowest way, over a slow link


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV of `tokens` tokens of one model."""

    layout: Layout
    tokens: int

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes(self.tokens)


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
