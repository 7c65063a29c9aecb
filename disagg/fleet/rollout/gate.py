"""The test that a host passes before the next one is restarted: its answer to the fixed prompt is the recorded one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg.config import Host
from disagg.errors import DisaggError, FleetError
from disagg.fleet.rollout.answers import RecordedAnswer, difference, kind, tolerance, unusable

Ask = Callable[[Host], RecordedAnswer]
"""A host's answer to the fixed prompt, computed by that host alone. Raises DisaggError."""


@dataclass(frozen=True, slots=True)
class Gate:
    """recorded: answers by kind of host. Of a kind without one, the first answer becomes it. A gateway has no answer of
    its own: it passes if it is healthy."""

    ask: Ask
    recorded: dict[str, RecordedAnswer]

    def needs(self, host: Host) -> bool:
        """Whether no answer of the host's kind is recorded."""
        return not host.gateway and kind(host) not in self.recorded

    def record(self, host: Host) -> None:
        """Record the host's answer. DisaggError if it gives none that others could be compared with."""
        answer = self.ask(host)
        if reason := unusable(answer):
            raise FleetError(f"{reason}, before the rollout", f"disagg logs --host {host.name}")
        self.recorded[kind(host)] = answer

    def test(self, host: Host) -> DisaggError | None:
        """Why the host does not pass."""
        if host.gateway:
            return None
        try:
            answer = self.ask(host)
        except DisaggError as error:
            return error
        reason = difference(self.recorded.get(kind(host), answer), answer, tolerance(host))
        if reason:
            return FleetError(reason, f"disagg logs --host {host.name}")
        self.recorded.setdefault(kind(host), answer)
        return None
