"""Requests outlive keepers and processes of models: the rows that stand for all of them, and their part of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.faults.kept import (
    REPRESENTATIVE,
    KeptCell,
    KeptFaults,
    KeptResult,
    cells,
    kept_faults,
    line,
    part,
    part_of,
    with_part,
)


def test_every_row_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(cell.id for cell in cells()).items() if count > 1] == []
    assert set(REPRESENTATIVE) <= set(cells())


def test_the_page_of_the_matrix_keeps_the_part_about_models() -> None:
    first, second = (part([KeptResult(REPRESENTATIVE[0], detail=detail)]) for detail in ("one", "two"))
    page = with_part(with_part("# Faults\n\nrows\n", first), second)
    assert page.startswith("# Faults\n\nrows\n\n## ") and part_of(page) == second and "| one |" not in page
    assert part_of("# Faults\n") == ""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptFaults]:
    with kept_faults(tmp_path_factory.mktemp("kept-faults")) as fleet:
        yield fleet


@pytest.mark.slow
@pytest.mark.parametrize("cell", REPRESENTATIVE, ids=lambda cell: cell.id)
def test_a_request_outlives_a_host_with_several_models(faults: KeptFaults, cell: KeptCell) -> None:
    result = faults.run(cell)
    assert result.problems == [], line(result)
