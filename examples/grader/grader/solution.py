"""Is a solution notebook fit to compare with? One that fails would give every student the same wrong points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grader.compare import evidence, named, outputs
from grader.errors import AssignmentError
from grader.notebook import Cell
from grader.rubric import Rubric
from grader.sandbox.values import Execution
from grader.validate import validate


def check(rubric: Rubric, cells: Sequence[Cell], execution: Execution) -> None:
    """Raises AssignmentError unless all its cells ran, and it has all that the rubric names."""
    if faults := [*_faults(rubric, cells, execution)]:
        raise AssignmentError("solution.ipynb: " + "; ".join(faults)[:400])


def _faults(rubric: Rubric, cells: Sequence[Cell], execution: Execution) -> Iterator[str]:
    for run in execution.cells:
        if run.state != "ran":
            yield f"cell {run.index + 1}: {run.error or execution.stopped or run.state}"
    for validation in validate(rubric, cells, execution):
        if not validation.present:
            yield f"no section {validation.section!r}"
        if validation.missing:
            yield f"no variable {', '.join(validation.missing)}"
    for section in rubric.sections:
        found = outputs(section, cells, execution)
        for one in section.checks:
            if evidence(one, found) in (None, ()):
                yield f"section {section.id!r}: nothing for the check {named(one)!r}"
