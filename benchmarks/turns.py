"""The order of what is compared, which changes from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(items: Sequence[T], number: int) -> list[T]:
    """The order of a round: over as many rounds as there are items, each has every place once."""
    first = number % max(1, len(items))
    return [*items[first:], *items[:first]]
