"""How a rollout ended, host by host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from disagg.errors import DisaggError, HostUnreachable
from disagg.fleet.rollout.policy import Phase

Ending = Literal["done", "unchanged", "rolled back", "stopped"]
"""stopped: it is not finished; the next call goes on, or undoes it."""
Outcome = Literal["rolled out", "unchanged", "rolled back", "left", "failed"]
"""left: it runs what it ran before. failed: it does not serve as it should."""

_OUTCOMES: Final[Mapping[Phase, Outcome]] = {
    "before": "left",
    "new": "failed",
    "passed": "rolled out",
    "failed": "failed",
    "back": "rolled back",
    "stuck": "failed",
    "outside": "unchanged",
}


@dataclass(frozen=True, slots=True)
class HostReport:
    """The outcome on one host. release: what is current there. error: why it failed, or why it was rolled back."""

    host: str
    outcome: Outcome
    release: str = ""
    error: DisaggError | None = None

    def to_json(self) -> dict[str, Any]:
        error = self.error.to_json() if self.error else None
        return {"host": self.host, "outcome": self.outcome, "release": self.release, "error": error}


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """The end of a rollout. reason: why it was stopped, if no host's error states it."""

    ending: Ending
    hosts: Sequence[HostReport]
    reason: str = ""

    @property
    def exit_code(self) -> int:
        """0: every host runs the new release; 4: a host cannot be reached; else 1."""
        if self.ending in ("done", "unchanged"):
            return 0
        return 4 if any(isinstance(one.error, HostUnreachable) for one in self.hosts) else 1

    def to_json(self) -> dict[str, Any]:
        return {"ending": self.ending, "reason": self.reason, "hosts": [one.to_json() for one in self.hosts]}


def outcome(phase: Phase) -> Outcome:
    """The outcome of a host that ends in this phase."""
    return _OUTCOMES[phase]


def ending(phases: Sequence[Phase], blocked: str) -> Ending:
    """The ending of a rollout whose hosts end in these phases."""
    inside = [phase for phase in phases if phase != "outside"]
    if blocked:
        return "stopped"
    if not inside:
        return "unchanged"
    return "done" if all(phase == "passed" for phase in inside) else "rolled back"
