"""The interval of a median, and what it tells about a goal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

Verdict = Literal["met", "not met", "undecided"]


class Estimate(NamedTuple):
    """A median and its 95 % confidence interval."""

    median: float
    low: float
    high: float

    def judged(self, goal: float) -> Verdict:
        """Whether the median is at most the goal, as far as the interval tells."""
        return "met" if self.high <= goal else "undecided" if self.low <= goal else "not met"


def estimate(values: Sequence[float]) -> Estimate:
    """The median of these values. Its interval lies between two of them, whatever their distribution: how many of n
    values are below the median is binomial, n / 2 +- 1.96 sqrt(n) / 2. All of them for fewer than six."""
    ordered = sorted(values)
    below = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))) - 1)
    return Estimate(statistics.median(ordered), ordered[below], ordered[-1 - below])
