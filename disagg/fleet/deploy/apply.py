"""Carry out a plan on a machine, step by step. Every step may be repeated; the first that fails ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg.errors import CommandFailed, DisaggError
from disagg.fleet.deploy.steps import Plan, PutTree, RunScript, Step, WriteFile
from disagg.fleet.machine import interruption
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.output import last_lines

_LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class Event:
    """Step `number` (from 1) of `total` has begun on a host; or, with `line`, has printed that."""

    host: str
    number: int
    total: int
    what: str
    line: str = ""


Report = Callable[[Event], None]
"""Told events, from several threads at once."""


def nobody(event: Event) -> None:
    """Nobody watches."""


def apply(machine: Machine, plan: Plan, report: Report = nobody) -> int:
    """Carry out the steps in order; bytes sent. The failing step's error names it and has its last lines."""
    sent = 0
    for number, step in enumerate(plan.steps, 1):
        interruption.check()
        report(Event(plan.host, number, len(plan.steps), step.what))

        def told(line: str, number: int = number, step: Step = step) -> None:
            report(Event(plan.host, number, len(plan.steps), step.what, line))

        try:
            sent += _perform(machine, step, told)
        except DisaggError as error:
            error.message = f"{error.message}\nin step {number} of {len(plan.steps)}: {step.what}"
            error.hint = error.hint or step.hint
            raise
    return sent


def _perform(machine: Machine, step: Step, on_line: Callable[[str], None]) -> int:
    """Carry out one step; bytes sent."""
    match step.action:
        case PutTree(target, files):
            return machine.put_tree(files, target)
        case WriteFile(path, content, mode):
            machine.write(path, content, mode=mode)
            return len(content)
        case RunScript(script, argv, timeout, environment):
            result = machine.run(argv, script=script, environment=environment, timeout=timeout, on_line=on_line)
    if result.ok:
        return 0
    words = last_lines(result.stderr.strip() or result.stdout, _LAST_LINES) or "it said nothing"
    raise CommandFailed(
        f"{machine.name}: exit code {result.code}:\n{words}", step.hint, exit_status=result.code, stdout=result.stdout
    )
