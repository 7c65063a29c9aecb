"""Check what a machine has, and carry out the steps that are missing, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from disagg.config import Deploy, Host
from disagg.errors import FleetError
from disagg.fleet.doctor.bootstrap.steps import SetUpStep, StepResult, as_account, check_line, judged, steps
from disagg.fleet.facts.checks import CheckedMachine, run_checks
from disagg.fleet.machine.base import Machine
from disagg.fleet.machine.output import last_lines

_STEP_S: Final = 1800.0
_RUN: Final = '/bin/sh -c "$1" </dev/null\n'


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Prepares one host's machine. report: called with (step, line) as a step prints it."""

    host: Host
    deploy: Deploy
    machine: Machine
    report: Callable[[str, str], None] = lambda step, line: None

    def look(self) -> list[StepResult]:
        """What is in place and what is not. Changes nothing."""
        system = run_checks(self.machine, {})
        wanted = steps(self.host, self.deploy, system.os, system.user)
        return judged(wanted, self._checked(wanted, system), self.host)

    def carry_out(self, results: Sequence[StepResult]) -> list[StepResult]:
        """Carry out the steps that are missing. What only a person can do is looked at again once another step is done,
        such as the account, without which no check could be run. The others keep their result, as do all after one
        whose check cannot be run: the machine does not answer."""
        system = run_checks(self.machine, {})
        done = list(results)
        for at, one in enumerate(results):
            changed = any(earlier.state == "done" for earlier in done[:at])
            if one.state == "in place" or (one.state == "by hand" and not changed):
                continue
            try:
                done[at] = self._put_in_place(one, system)
            except FleetError as error:
                done[at] = replace(one, state="failed", error=error.message)
                break
        return done

    def _put_in_place(self, missing: StepResult, system: CheckedMachine) -> StepResult:
        step = missing.step
        if (before := self._checked([step], system).results[step.name]).ok:  # an earlier step has brought it
            return replace(missing, state="in place", found=before.found)
        if missing.state == "by hand":
            return replace(missing, found=before.found)
        try:
            why = self._run(step, system)
        except FleetError as error:
            why = error.message
        after = self._checked([step], system).results[step.name]
        if after.ok and not why:
            return replace(missing, state="done", found=after.found)
        why = why or "its command succeeded, and it is still missing"
        return replace(missing, state="failed", found=after.found, error=why)

    def _run(self, step: SetUpStep, system: CheckedMachine) -> str:
        """Why it failed, "" if it did not."""
        line = as_account(step.command, self._account(system), system, step.root)
        self.report(step.name, f"$ {line}")
        result = self.machine.run(
            [line], script=_RUN, timeout=_STEP_S, on_line=lambda text: self.report(step.name, text)
        )
        return "" if result.ok else last_lines(result.stderr.strip() or result.stdout, 3) or f"exit code {result.code}"

    def _checked(self, wanted: Iterable[SetUpStep], system: CheckedMachine) -> CheckedMachine:
        """The machine with the results of these checks."""
        account = self._account(system)
        return run_checks(self.machine, {step.name: check_line(step, account, system) for step in wanted})

    def _account(self, system: CheckedMachine) -> str:
        return self.host.user or system.user
