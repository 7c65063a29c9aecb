"""The interface of a transport, which moves KV from a sender on the prefill host to a receiver on the decode host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from disagg.api.base import Contract
from disagg.api.layout import Layout

STEP_TIMEOUT_S = 60.0  # for a single step of the other end
LOAD_TIMEOUT_S = 120.0  # for loading its frameworks from a cold disk
ROUND_TIMEOUT_S = 600.0  # for one round of the slowest transport over a slow link


@dataclass(frozen=True, slots=True)
class RandomKV:
    """The KV of `tokens` tokens of one model."""

    layout: Layout
    tokens: int

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes(self.tokens)


class ReceiverOffer(Contract, frozen=True, kw_only=True):
    """Where and with which secret the sender connects. key: of the bare socket and HTTP. ticket: of the hand-off."""

    host: str
    port: int
    key: str = ""
    ticket: str = ""


class Sender(Protocol):
    """The prefill host's end."""

    def prepare(self, offer: ReceiverOffer) -> None:
        """Untimed: connect to the receiver."""

    def send(self) -> None:
        """Timed: send all of the KV."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The decode host's end."""

    def offer(self) -> ReceiverOffer:
        """Untimed: listen, and return what the sender needs to connect."""

    def accept(self) -> None:
        """Untimed: called after the sender's `prepare`."""

    def receive(self) -> Sequence[Any]:
        """Timed: receive all of the KV. Returns each tensor's bytes, ready for the decode engine, keys and values
        alternating."""

    def close(self) -> None: ...
