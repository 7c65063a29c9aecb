"""What running several models at once is worth, against one after the other: the formulas of `disagg demo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several models asked at the same time, and again one after the other. Times are seconds of wall time.

    parallel_wall: of all models at the same time. own: by model, of that model by itself. completion_tokens: output
    tokens of all answers. same_text: whether all runs gave the same answers. rounds: of which each time is the median.
    """

    parallel_wall: float
    own: dict[str, float]
    completion_tokens: int
    same_text: bool
    rounds: int = 1

    @property
    def sequential_sum(self) -> float:
        """The time of all models one after the other."""
        return sum(self.own.values())

    @property
    def speedup(self) -> float:
        """One after the other / at the same time."""
        return self.sequential_sum / self.parallel_wall

    @property
    def throughput(self) -> float:
        """Output tokens per second of all models at the same time."""
        return self.completion_tokens / self.parallel_wall

    @property
    def over_slower(self) -> float:
        """At the same time / the slowest model by itself: what sharing this machine costs."""
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
            "rounds": self.rounds,
        }
