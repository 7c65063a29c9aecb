"""Several requests answered together: POST /v1/parallel of a gateway, and what running them at once was worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, UnsetType

from disagg.api.base import Contract

MAX_ITEMS: Final = 32
MAX_NAME: Final = 64


class ParallelFigures(Contract, frozen=True):
    """What it was worth to run several requests at once, in seconds. Only answers that are complete count.

    complete: their number, n. wall: from the moment that all were sent to the end of the last answer. sequential_sum:
    the sum of their times, each from that moment to its own end. efficiency: sequential_sum / (wall x n): 1 if all took
    as long as the longest one, 1/n if all but that one took no time; None if there are none. A request that shares
    hosts with another one takes longer than alone, so that the sum is an upper bound of the time one after the other.
    """

    complete: int
    wall: float
    sequential_sum: float
    efficiency: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> ParallelFigures:
        """The figures of complete answers, from their times."""
        wall, total = max(seconds, default=0.0), sum(seconds)
        return cls(len(seconds), wall, total, total / (wall * len(seconds)) if wall > 0 else None)


class ParallelBody(Contract, frozen=True):
    """The body of POST /v1/parallel. requests: each the body of a chat or a completion, by whether it has `messages` or
    `prompt`, and a text `id` of at most 64 characters if its caller likes; its own `stream` does not count."""

    requests: Annotated[tuple[Mapping[str, Any], ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    stream: bool | None = None


class ParallelResult(Contract, frozen=True):
    """The end of one request. index: its number in the body, from 0. id: as its caller named it. status: as if it had
    been sent alone. seconds: from the moment that all were sent. body: the answer or the error; in a stream only an
    error, because the answer has been sent."""

    index: int
    id: str | None
    status: int
    seconds: float
    body: Mapping[str, Any] | UnsetType = UNSET


class ParallelAnswer(Contract, frozen=True):
    """The answer to POST /v1/parallel that is not streamed. results: in the order of the requests."""

    id: str
    object: str
    created: int
    results: tuple[ParallelResult, ...]
    disagg: ParallelFigures


class ParallelChunk(Contract, frozen=True):
    """One event of a stream: a chunk of the answer to one request."""

    index: int
    id: str | None
    body: Mapping[str, Any]


class ParallelEnd(Contract, frozen=True):
    """The last event of a stream before `[DONE]`."""

    disagg: ParallelFigures
