"""What outlasts an interruption of a rollout: rollout.json in the fleet's state folder.

The record has what the hosts cannot show: which release each is to return to, what the hosts answered before, and
which answers were right. What runs on a host is read from the host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from disagg.errors import FleetError
from disagg.files import replace_file
from disagg.fleet.rollout.gate import RecordedAnswer
from disagg.fleet.rollout.policy import Phase

T = TypeVar("T")
RecordedPhase = Literal["passed", "failed", "back", "stuck"]
"""The phases that do not follow from what runs on a host: they are known from a test of its answer only."""


class RolloutRecord(msgspec.Struct):
    """An unfinished rollout. target, before: the releases that hosts are to run, and that ran. current: those that were
    current, also of hosts that run their target already. answers: before the rollout, by kind of host. verdicts: phases
    by host."""

    target: dict[str, str]
    before: dict[str, str]
    current: dict[str, str] = {}
    answers: dict[str, RecordedAnswer] = {}
    verdicts: dict[str, RecordedPhase] = {}

    def continued_by(self, target: dict[str, str]) -> bool:
        """Whether a rollout to these releases goes on with this one."""
        return all(target.get(name) == release for name, release in self.target.items())

    def without(self, names: Collection[str]) -> RolloutRecord:
        """The record of its other hosts."""

        def rest(of: Mapping[str, T]) -> dict[str, T]:
            return {name: value for name, value in of.items() if name not in names}

        return RolloutRecord(
            rest(self.target), rest(self.before), rest(self.current), dict(self.answers), rest(self.verdicts)
        )


def phase(target: str, before: str, runs: str, verdict: RecordedPhase | None) -> Phase:
    """A host's phase. runs: the release that its server runs now, "" if none does."""
    if verdict in ("failed", "stuck"):
        return verdict if runs != before or not before else "back"
    if verdict == "back":
        return "back" if runs == before else "failed"
    if runs != target:
        return "before"
    return "passed" if verdict == "passed" else "new"


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The record's file. Writing replaces it whole."""

    path: Path

    def read(self) -> RolloutRecord:
        """The record of an unfinished rollout; an empty one if there is none. FleetError if it is damaged."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=RolloutRecord)
        except FileNotFoundError:
            return RolloutRecord({}, {})
        except (OSError, msgspec.MsgspecError) as error:
            message = f"{self.path}, the record of an interrupted rollout, cannot be read: {error}"
            raise FleetError(message, f"rm {self.path} forgets that rollout") from error

    def write(self, record: RolloutRecord) -> None:
        """Replace the record. FleetError if that fails: without it an interrupted rollout could not go on."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.path, msgspec.json.encode(record))
        except OSError as error:
            raise FleetError(f"cannot write {self.path}: {error.strerror}", "free space on that disk") from error

    def remove(self) -> None:
        """The rollout has ended."""
        self.path.unlink(missing_ok=True)
