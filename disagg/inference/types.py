"""What the public Client returns and streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg.inference.metrics import Metrics

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token with its log-probability and the likeliest alternatives (id, logprob)."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


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
