"""Carry out a plan on a machine, step by step, up to the first step that fails. Every step may be repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg.errors import CommandFailed, DisaggError
from disagg.fleet.deploy.pace import UploadPace
from disagg.fleet.deploy.steps import Plan, PutTree, RunScript, Step, WriteFile
from disagg.fleet.machine import interruption
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.output import last_lines

_LAST_LINES = 12


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
            return machine.put_tree(files, target, parts=parts, on_moved=UploadPace(on_line).moved)
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
