"""Every request ends, exactly or with a stated reason, whatever fails: the cells that stand for the matrix."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.faults import poison
from tests.faults.cells import REPRESENTATIVE, cells
from tests.faults.fleet import running
from tests.faults.matrix import SAMPLINGS, Matrix
from tests.faults.report import line

CELLS = {cell.id: cell for cell in cells()}


def test_every_cell_of_the_matrix_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(cell.id for cell in cells()).items() if count > 1] == []


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    from tests import tiny_models

    folder = tmp_path_factory.mktemp("faults")
    with running(folder, tiny_models.make("qwen3", folder / "model")) as fleet:
        yield Matrix(fleet)


@pytest.mark.parametrize(("number", "name"), list(enumerate(REPRESENTATIVE)), ids=str)
def test_a_request_ends_as_the_matrix_states_it(matrix: Matrix, number: int, name: str) -> None:
    result = matrix.run(CELLS[name], list(SAMPLINGS)[number % 2])
    assert result.problems == [], line(result)


def test_poisonous_schemas_end_no_host_and_no_other_clients_stream(matrix: Matrix) -> None:
    two = {name: poison.DIALECTS[name] for name in ("chat, response_format", "messages")}
    report = asyncio.run(poison.run(matrix.fleet, poison.Settings(times=1, tokens=60, warm=1), two))
    # Pieces of answers wait for a core here, behind other tests: `python -m tests.faults poison` measures the gaps.
    assert [problem for problem in report.problems if not problem.startswith("a gap")] == []
    assert {status for counts in report.statuses.values() for status in counts} == {400}
    assert len(report.gaps) >= poison.STREAMS
