"""A generated token."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.api.events import FinishReason


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. top: (id, logprob) of the likeliest tokens, if requested.
    finish: set on the last token of a request: "stop" for an end-of-sequence token, "length" at max_tokens."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
