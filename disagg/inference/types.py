"""What the public Client returns and streams."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.api.events import TokenLogprob
from disagg.inference.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer: the tokens of one decode step and the text that became certain with them."""

    text: str
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `warnings`: what the user should know, e.g. "Using fallback mode - slower performance"."""

    text: str
    tokens: tuple[TokenLogprob, ...]
    finish_reason: str
    metrics: Metrics
    warnings: tuple[str, ...] = ()
