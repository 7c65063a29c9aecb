"""tests/surveys/tables.py: rows of the tables in docs/architectures.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.surveys.tables import short, write_rows

MODEL = Path("/somewhere/model")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{MODEL}: it has no weights", "it has no weights"),
        (
            f"mlx-lm cannot load {MODEL}: ValueError:\n  no such type",
            "mlx-lm cannot load the model: ValueError: no such type",
        ),
        ("a | b", "a / b"),
        ("x" * 181, "x" * 177 + "..."),
    ],
    ids=["of a folder", "of several lines", "with a bar", "long"],
)
def test_a_reason_fits_a_cell_and_does_not_name_the_folder(text: str, shown: str) -> None:
    assert short(text, MODEL) == shown


def test_a_new_row_takes_the_place_of_the_one_with_its_name(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<first>\n| head |\n| --- |\n| a | 1 |\n| b | 2 |\n<last>\nafter\n", encoding="utf-8")
    write_rows(page, "<first>\n", "<last>\n", "| head |\n| --- |\n", {"a": "| a | 3 |\n", "c": "| c | 4 |\n"})
    table = "| head |\n| --- |\n| a | 3 |\n| b | 2 |\n| c | 4 |\n"
    assert page.read_text(encoding="utf-8") == f"before\n<first>\n{table}<last>\nafter\n"
