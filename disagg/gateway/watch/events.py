"""The events of a request, from its beginning to its end. Every event names its request; `Completed` alone has a text,
and `Accepted` if prompts are kept."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from disagg.gateway.dialects.problems import Problem
from disagg.inference.types import Completion, Stage

State = Literal["ok", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request has begun. number: unique in this gateway. api: the dialect. key, key_id: name and id of the caller's
    key, None without keys. at: seconds since 1970; began: the same moment by time.monotonic(). prompts: their texts,
    None if they are not kept."""

    number: int
    request_id: str
    api: str
    model: str
    key: str | None
    choices: int
    at: float
    began: float
    prompts: tuple[str, ...] | None = None
    key_id: str | None = None


@dataclass(frozen=True, slots=True)
class StageEntered:
    """Answer number `choice` has entered another stage."""

    request: Accepted
    choice: int
    stage: Stage


@dataclass(frozen=True, slots=True)
class Generated:
    """So many more tokens of answer number `choice` have arrived; first: they are its first ones. at: monotonic."""

    request: Accepted
    choice: int
    tokens: int
    first: bool
    at: float


@dataclass(frozen=True, slots=True)
class Completed:
    """Answer number `choice` is complete. stage: its last one, None if it had none."""

    request: Accepted
    choice: int
    completion: Completion
    stage: Stage | None

    @property
    def fell_back(self) -> bool:
        """Whether the answer came about without its hand-off, or without a decode host."""
        left = self.stage is not None and self.stage.reason == "no decode host is left"
        return left or self.completion.metrics.method == "fallback"


@dataclass(frozen=True, slots=True)
class Ended:
    """The request has ended. seconds: since it was accepted. tokens: of the answers that are not complete. stage: the
    last one of the first of these. ttft: seconds until the first text of any of these; None if none came."""

    request: Accepted
    state: State
    problem: Problem | None
    seconds: float
    tokens: int
    stage: Stage | None
    ttft: float | None = None

    @property
    def refused(self) -> bool:
        """Whether the request itself is wrong: no host has failed."""
        status = self.problem.status if self.problem else 0
        return 400 <= status < 500 and status != HTTPStatus.TOO_MANY_REQUESTS


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was refused before it began. model: empty if it named none that the fleet has."""

    model: str
    problem: Problem


RequestEvent = Accepted | StageEntered | Generated | Completed | Ended | Refused
