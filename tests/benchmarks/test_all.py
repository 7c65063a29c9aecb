"""`python -m benchmarks`: its table, also of a run of which a part failed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.__main__ import Row


def works(rounds: int, quick: bool) -> Iterator[Row]:
    yield benchmarks.at_least("figure", 2.0, 1.0)


def fails(rounds: int, quick: bool) -> Iterator[Row]:
    benchmarks.run([sys.executable, "-c", "raise SystemExit('no port is free')"])
    yield benchmarks.at_least("figure of the part that fails", 2.0, 1.0)


def test_a_part_that_fails_is_a_row_and_the_other_rows_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "table.md"
    monkeypatch.setattr(benchmarks, "PARTS", (fails, works))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--markdown", str(written)])
    with pytest.raises(SystemExit, match="1"):
        benchmarks.main()
    assert "no port is free" in capsys.readouterr().out
    rows = written.read_text().splitlines()[4:]
    assert "**failed**" in rows[0] and "exit code 1" in rows[0]
    assert rows[1] == "| figure | at least 1 | 2 | met |"


def test_the_table_takes_the_place_of_the_one_before_in_a_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    document = tmp_path / "performance.md"
    old = benchmarks.markdown([Row("old", "at least 1", "2", "met")], "2 cores, load 0.1 at the beginning")
    document.write_text(f"# Performance\n\n{old}\nWhat follows.\n\n| another | table |\n")
    monkeypatch.setattr(benchmarks, "PARTS", (works,))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--markdown", str(document)])
    benchmarks.main()
    text = document.read_text()
    assert "| figure | at least 1 | 2 | met |" in text and "| old |" not in text
    assert text.startswith("# Performance\n\n") and text.endswith("\n\nWhat follows.\n\n| another | table |\n")


def test_square_brackets_are_text_and_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(rounds: int, quick: bool) -> Iterator[Row]:
        yield benchmarks.skipped("figure [a]", "more", "pip install '.[peers]'")

    monkeypatch.setattr(benchmarks, "PARTS", (lacks,))
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    benchmarks.main()
    out = capsys.readouterr().out
    assert "figure [a]" in out and "'.[peers]'" in out
