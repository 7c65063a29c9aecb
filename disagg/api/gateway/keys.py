"""The bounds of what a key of the gateway's clients may have."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

MAX_ANSWERS: Final = 512
"""Answers that a gateway computes at a time."""

PerMinute = Annotated[int, Meta(ge=1)]
Parallel = Annotated[int, Meta(ge=1, le=MAX_ANSWERS)]
