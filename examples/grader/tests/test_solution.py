"""A solution notebook that is not fit to compare with is an error of the assignment, not zero points for everybody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grader import notebook, solution
from grader.errors import AssignmentError
from grader.sandbox import Execution
from grader.sandbox.values import Other
from tests.fake import RESULTS, SAMPLE, SOLUTION, ran

CELLS = notebook.cells(SOLUTION, SAMPLE.rubric.sections)
RAN = ran([cell.index for cell in CELLS if cell.kind == "code"])


def test_a_solution_that_has_all_that_the_rubric_names_is_fit() -> None:
    solution.check(SAMPLE.rubric, CELLS, RAN)


@pytest.mark.parametrize(
    ("execution", "fault"),
    [
        (replace(RAN, cells=(replace(RAN.cells[0], state="failed", error="KeyError: 1"), *RAN.cells[1:])), "KeyError"),
        (replace(RAN, cells=(*RAN.cells[:-1], replace(RAN.cells[-1], state="not run")), stopped="time"), "time"),
        (replace(RAN, variables={name: RESULTS[name] for name in ("mean", "by_city")}), "no variable warmest"),
        (replace(RAN, variables=RESULTS | {"by_city": Other(kind="other", type="list")}), "check 'table by_city'"),
        (replace(RAN, cells=tuple(replace(run, plots=()) for run in RAN.cells)), "check 'plot'"),
        (replace(RAN, cells=tuple(replace(run, text="") for run in RAN.cells)), "check 'number'"),
    ],
)
def test_a_solution_without_something_is_refused_with_its_name(execution: Execution, fault: str) -> None:
    with pytest.raises(AssignmentError, match=fault):
        solution.check(SAMPLE.rubric, CELLS, execution)


def test_a_solution_without_a_section_is_refused() -> None:
    with pytest.raises(AssignmentError, match="no section 'plot'"):
        solution.check(SAMPLE.rubric, [cell for cell in CELLS if cell.section != "plot"], RAN)
