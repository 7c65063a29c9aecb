"""A peer's words in our messages."""

from __future__ import annotations

MAX_QUOTED_CHARS = 64


def clipped(value: object) -> str:
    """What a peer sent, as text of at most 64 characters: a peer without a ticket must not fill the log."""
    text = str(value)
    return text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 1] + "…"
