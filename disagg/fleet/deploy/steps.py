"""The steps of a plan, and how they are carried out on a machine: in order, up to the first that fails.

Every step may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from disagg.errors import CommandFailed, DisaggError
from disagg.fleet.facts.findings import Finding
from disagg.fleet.machine import interruption
from disagg.fleet.machine.machine import Machine, last_lines
from disagg.fleet.machine.upload import UploadPace, put_tree
from disagg.fleet.services.base import RunScript

_LAST_LINES = 12


ServiceAction = Literal["", "start", "restart"]


@dataclass(frozen=True, slots=True)
class PutTree:
    """Write a folder of files atomically. parts: a folder beside it in which large ones are gathered, so that a broken
    upload goes on where it stopped; "": none."""

    target: str
    files: Mapping[str, bytes | Path] = field(repr=False)
    parts: str = ""


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write one file atomically."""

    path: str
    content: bytes = field(repr=False)
    mode: int = 0o644


Action = PutTree | WriteFile | RunScript


@dataclass(frozen=True, slots=True)
class Step:
    """One step. what: its description. hint: what to do if it fails."""

    name: str
    what: str
    action: Action
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "what": self.what}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a host cannot be deployed, and what to do about it."""

    cause: str
    hint: str

    @staticmethod
    def of(found: Finding) -> Refusal:
        return Refusal(found.text, found.hint)


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps on one host; nothing to do if there are neither steps nor refusals.

    release: the hash of the release that is current afterwards. needs: the command its server needs to run it.
    packages: name -> version of what its environment has, empty without a lock for its platform. package_bytes: of
    their wheels. down: why its server does not run, if no `disagg stop` is the reason. at_once: it runs a release from
    before TLS and this one is later: hosts of the two kinds hand nothing over to each other. rotating: it accepts more
    than one token.
    """

    host: str
    release: str
    steps: tuple[Step, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    needs: ServiceAction = ""
    notes: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    package_bytes: int = 0
    down: str = ""
    at_once: bool = False
    rotating: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "release": self.release,
            "steps": [step.to_json() for step in self.steps],
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "needs": self.needs,
            "notes": list(self.notes),
            "packages": dict(self.packages),
            "package_bytes": self.package_bytes,
            "down": self.down,
            "at_once": self.at_once,
            "rotating": self.rotating,
        }


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Step `number` (from 1) of `total` has begun on a host, or has printed `line`."""

    host: str
    number: int
    total: int
    what: str
    line: str = ""


OnStep = Callable[[StepProgress], None]
"""Called with each StepProgress, from several threads."""


def ignore(progress: StepProgress) -> None:
    """An OnStep that does nothing."""


def apply(machine: Machine, plan: Plan, report: OnStep = ignore) -> int:
    """Carry out the steps in order; returns the bytes sent. The error of a failed step names it and has its last
    lines of output."""
    sent = 0
    for number, step in enumerate(plan.steps, 1):
        interruption.check()
        report(StepProgress(plan.host, number, len(plan.steps), step.what))

        def on_line(line: str, number: int = number, step: Step = step) -> None:
            report(StepProgress(plan.host, number, len(plan.steps), step.what, line))

        try:
            sent += _perform(machine, step, on_line)
        except DisaggError as error:
            error.message = f"{error.message}\nin step {number} of {len(plan.steps)}: {step.what}"
            error.hint = error.hint or step.hint
            raise
    return sent


def _perform(machine: Machine, step: Step, on_line: Callable[[str], None]) -> int:
    """Carry out one step; returns the bytes sent."""
    match step.action:
        case PutTree(target, files, parts):
            return put_tree(machine, files, target, parts=parts, on_moved=UploadPace(on_line).moved)
        case WriteFile(path, content, mode):
            machine.write(path, content, mode=mode)
            return len(content)
        case RunScript(script, argv, timeout, environment):
            result = machine.run(argv, script=script, environment=environment, timeout=timeout, on_line=on_line)
    if result.ok:
        return 0
    output = last_lines(result.stderr.strip() or result.stdout, _LAST_LINES) or "no output"
    raise CommandFailed(
        f"{machine.name}: exit code {result.code}:\n{output}", step.hint, exit_status=result.code, stdout=result.stdout
    )
