"""How far a rollout has come: each host's phase, what an interruption must not lose, and how it ended.

rollout.json in the fleet's state folder has what the hosts cannot show: which release each is to return to, what the
hosts answered before, and which answers were right. What runs on a host is read from the host.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from disagg.errors import DisaggError, FleetError, HostUnreachable
from disagg.files import replace_file
from disagg.fleet.facts.host import HostFacts
from disagg.fleet.rollout.gate import RecordedAnswer
from disagg.fleet.rollout.policy import Phase

T = TypeVar("T")
RecordedPhase = Literal["passed", "failed", "back", "stuck"]
"""The phases that do not follow from what runs on a host: they are known from a test of its answer only."""
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


@dataclass(slots=True)
class Progress:
    """One rollout of the hosts of `phases`. pending: hosts on which it has made a release current that nothing was
    restarted for. errors: the first of each host."""

    file: RecordFile
    record: RolloutRecord = field(default_factory=lambda: RolloutRecord({}, {}))
    phases: dict[str, Phase] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    errors: dict[str, DisaggError] = field(default_factory=dict)
    _found: dict[str, str] = field(default_factory=dict)

    def begin(self, earlier: RolloutRecord, found: Sequence[HostFacts], target: Mapping[str, str]) -> None:
        """The phase of each host, by its links and the record of an earlier call. target: the releases to go to."""
        self.record = earlier.without({facts.host for facts in found})
        self.record.verdicts |= earlier.verdicts
        for facts in found:
            name, self._found[facts.host] = facts.host, facts.current
            self.record.current[name] = earlier.current.get(name, facts.current)
            if facts.current != self.record.current[name]:
                self.pending.add(name)
            if name not in earlier.target and target.get(name, facts.runs) == facts.runs:
                self.phases[name] = "outside"
                continue
            before = earlier.before.get(name, "") if name in earlier.target else facts.release
            self.record.target[name], self.record.before[name] = target[name], before
            self.phases[name] = phase(target[name], before, facts.runs, earlier.verdicts.get(name))

    @property
    def changing(self) -> list[str]:
        """The hosts that this command changes."""
        return [name for name, reached in self.phases.items() if reached != "outside"]

    def settle(self, name: str, reached: Phase, error: DisaggError | None) -> None:
        """A host has reached a phase."""
        self.phases[name] = reached
        if error is not None:
            self.errors.setdefault(name, error)

    def keep(self) -> None:
        """Write what an interruption must not lose."""
        for name, reached in self.phases.items():
            self.record.verdicts.pop(name, None)
            if reached in ("passed", "failed", "back", "stuck"):
                self.record.verdicts[name] = reached
        self.file.write(self.record)

    def end(self, blocked: str) -> RolloutReport:
        """How it ended. blocked: why it cannot go on, if so; else these hosts have ended it, and others, which were not
        selected, have not."""
        inside = [self.phases[name] for name in self.changing]
        ended: Ending = "rolled back"
        if blocked:
            ended = "stopped"
        elif all(reached == "passed" for reached in inside):
            ended = "done" if inside else "unchanged"
        if not blocked:
            rest = self.record.without(self.phases.keys())
            if rest.target:
                self.file.write(rest)
            else:
                self.file.remove()
        hosts = [
            HostReport(name, _OUTCOMES[reached], self._runs(name, reached), self.errors.get(name))
            for name, reached in self.phases.items()
        ]
        return RolloutReport(ended, hosts, blocked)

    def _runs(self, name: str, reached: Phase) -> str:
        if reached == "outside":
            return self._found[name]
        return (self.record.target if reached in ("new", "passed", "failed") else self.record.before).get(name, "")


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
