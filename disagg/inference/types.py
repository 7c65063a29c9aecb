"""What the public Client returns and streams."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.api.events import FinishReason, TokenLogprob
from disagg.inference.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer: the tokens of one or more decode steps and the text that became certain with them.

    arrived: time.monotonic() when the piece arrived here, however late it is read from the stream. note: what the
    caller should know about the request meanwhile, such as that another host goes on with it; such a chunk has no text.
    """

    text: str
    tokens: tuple[TokenLogprob, ...]
    arrived: float = field(default=0.0, compare=False)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `warnings`: what the user should know, e.g. "Using fallback mode - slower performance"."""

    text: str
    tokens: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    metrics: Metrics
    warnings: tuple[str, ...] = ()
