"""What running several models at once is worth, against one after the other: the formulas of `disagg demo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several models run at once, and each by itself. Seconds; tokens are output tokens.

    `own`: model -> wall time by itself. `same_text`: whether both runs gave the same answers.
    """

    parallel_wall: float
    own: dict[str, float]
    completion_tokens: int
    same_text: bool

    @property
    def sequential_sum(self) -> float:
        return sum(self.own.values())

    @property
    def speedup(self) -> float:
        return self.sequential_sum / self.parallel_wall

    @property
    def throughput(self) -> float:
        return self.completion_tokens / self.parallel_wall

    @property
    def over_slower(self) -> float:
        return self.parallel_wall / max(self.own.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "parallel_wall": self.parallel_wall,
            "own_wall": self.own,
            "sequential_sum": self.sequential_sum,
            "speedup": self.speedup,
            "throughput": self.throughput,
            "parallel_over_slower": self.over_slower,
            "same_text": self.same_text,
        }
