"""The sample notebooks in the sandbox: layers 1 and 2, exact."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from grader import notebook, rubric, sandbox
from grader.compare import Comparison, compare
from grader.injection import find
from grader.notebook import Cell
from grader.rubric import Limits
from grader.sandbox import Execution
from grader.validate import Validation, validate

ROOT = Path(__file__).parents[2]
SAMPLE = rubric.load(ROOT / "assignments" / "sample")
PATIENT = Limits(cell_seconds=120, notebook_seconds=600)
IMPATIENT = Limits(cell_seconds=3, notebook_seconds=600)
"""For the notebook with a loop without an end, whose other cells take milliseconds."""


@cache
def executed(path: Path, limits: Limits) -> tuple[tuple[Cell, ...], Execution]:
    content = notebook.read(path.read_bytes())
    execution = sandbox.execute(content, SAMPLE.rubric.variables, limits, SAMPLE.data)
    return notebook.cells(content, SAMPLE.rubric.sections), execution


def layers(name: str, limits: Limits) -> tuple[tuple[Validation, ...], tuple[Comparison, ...]]:
    cells, execution = executed(ROOT / "samples" / f"{name}.ipynb", limits)
    expected_cells, expected = executed(SAMPLE.folder / "solution.ipynb", PATIENT)
    return (
        validate(SAMPLE.rubric, cells, execution),
        compare(SAMPLE.rubric, cells, execution, expected_cells, expected),
    )


# Per section: share by layer 1, cells, failed; per check: share by layer 2.
EXPECTED = {
    "right": ([(1.0, 1, 0), (1.0, 1, 0), (1.0, 2, 0)], [1, 1, 1, 1, 1]),
    "half": ([(1.0, 1, 0), (1.0, 1, 0), (1.0, 2, 0)], [1, 1, 2 / 3, 0, 1]),
    "failing": ([(0.0, 2, 2), (0.0, 1, 1), (0.75, 2, 1)], [0, 0, 0, 0, 0]),
    "empty": ([(0.0, 0, 0), (0.0, 0, 0), (0.0, 0, 0)], [0, 0, 0, 0, 0]),
    "infinite_loop": ([(1.0, 1, 0), (0.0, 1, 1), (1.0, 1, 0)], [1, 1, 0, 0, 1]),
    "huge_output": ([(1.0, 1, 0), (0.0, 1, 1), (0.5, 1, 1)], [1, 1, 0, 0, 1]),
    "injection": ([(1.0, 1, 0), (1.0, 1, 0), (1.0, 1, 0)], [0, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_layers_1_and_2_of_a_sample_are_exactly_these(name: str) -> None:
    validations, comparisons = layers(name, IMPATIENT if name == "infinite_loop" else PATIENT)
    shares = [(one.share, one.cells, one.failed) for one in validations]
    assert (shares, [pytest.approx(one.share) for one in comparisons]) == EXPECTED[name]


def test_errors_are_stated_as_the_kernel_reported_them() -> None:
    _, execution = executed(ROOT / "samples" / "failing.ipynb", PATIENT)
    assert [run.error.split(":")[0] for run in execution.cells] == [
        "",
        "TypeError",
        "NameError",
        "NameError",
        "",
        "ZeroDivisionError",
    ]


def test_a_cell_that_does_not_end_is_interrupted_and_the_next_ones_run() -> None:
    _, execution = executed(ROOT / "samples" / "infinite_loop.ipynb", IMPATIENT)
    assert [run.error for run in execution.cells] == ["", "", "the cell reached its time limit", ""]
    assert execution.stopped is None


def test_a_cell_that_prints_without_end_fails_and_keeps_little() -> None:
    _, execution = executed(ROOT / "samples" / "huge_output.ipynb", PATIENT)
    failed = [run for run in execution.cells if run.state == "failed"]
    assert [run.error.split(":")[0] for run in failed] == ["OutputLimitError", "OutputLimitError"]
    assert all(len(run.text) <= 20_000 for run in execution.cells)


def test_only_the_notebook_that_addresses_the_models_is_flagged() -> None:
    flagged = {}
    for path in sorted((ROOT / "samples").glob("*.ipynb")):
        cells = notebook.cells(notebook.read(path.read_bytes()), SAMPLE.rubric.sections)
        if finds := find(cells):
            flagged[path.stem] = [one.cell for one in finds]
    assert flagged == {"injection": [0, 3, 4]}
