"""The record of one request, and of one turn: the requests of one mode at one point of the sweep. A point is one length
of prompt and answer at one load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disagg.api.names import Role
from disagg.bench import Mode
from disagg.bench.beside import BesideFigures
from disagg.inference.attempt import Alone
from disagg.inference.metrics import Metrics

MODES: tuple[Mode, ...] = ("disaggregated", "split", "decode-alone", "prefill-alone")
"""The modes that hosts which disagg runs can have."""
ALONE: Mapping[Mode, Alone | None] = {
    "disaggregated": None,
    "split": None,
    "decode-alone": "decode",
    "prefill-alone": "prefill",
    "whole": "whole",
}
ROLES: Mapping[Mode, tuple[Role, ...]] = {
    "disaggregated": ("prefill", "decode"),
    "split": ("prefill", "decode"),
    "decode-alone": ("decode",),
    "prefill-alone": ("prefill",),
    "whole": ("whole",),
}
"""The roles whose machines a mode occupies."""

WRONG_COUNT = "WrongTokenCount"


@dataclass(frozen=True, slots=True)
class Record:
    """One finished request: `metrics` if it completed, else `error` (its kind) and `message`.

    due, sent: seconds since the run began; sent - due is the delay of this program itself. itl: seconds between
    consecutive tokens; 0 for tokens that arrived together.
    """

    index: int
    due: float
    sent: float
    metrics: Metrics | None = None
    itl: tuple[float, ...] = ()
    error: str = ""
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.metrics is not None

    @property
    def fell_back(self) -> bool:
        """Whether the decode host computed the prompt itself because the hand-off failed."""
        return self.metrics is not None and self.metrics.method == "fallback"

    def to_json(self) -> dict[str, Any]:
        """All fields but `itl`, in seconds."""
        body: dict[str, Any] = {"index": self.index, "due": self.due, "sent": self.sent}
        if self.metrics is None:
            return {**body, "error": self.error, "message": self.message}
        one = self.metrics
        return {
            **body,
            "method": one.method,
            "input_len": one.prompt_tokens,
            "output_len": one.completion_tokens,
            "ttft": one.ttft,
            "e2el": one.total_time,
        }


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The records of one turn. began, ended: time.monotonic(), first request due -> last one ended.

    unfinished: requests under way when the run was stopped, neither completed nor failed. beside: of the answers that
    ran beside, None if none did.
    """

    point: int
    mode: Mode
    warmup: bool
    began: float
    ended: float
    records: tuple[Record, ...]
    unfinished: int = 0
    beside: BesideFigures | None = None

    @property
    def duration(self) -> float:
        return self.ended - self.began
