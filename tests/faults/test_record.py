"""A run of the matrix that was interrupted goes on with the rows that are missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from subprocess import check_call

import pytest

from tests.faults.cells import cells
from tests.faults.matrix import Result
from tests.faults.record import Results, current_commit
from tests.programs import need

FIRST, SECOND = list(cells())[:2]
RESULT = Result(FIRST, "greedy", "answer", "disaggregated", 1.5, 0.25, ["a problem"])


def test_an_interrupted_run_goes_on_with_the_rows_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "build" / "results"
    Results(path, resume=True, commit="c").add(RESULT)
    with path.open("a") as file:
        file.write('{"cell": "cut off in mid-wri')
    again = Results(path, resume=True, commit="c")
    assert again[FIRST, "greedy"] == RESULT
    again.add(replace(RESULT, sampling="sampled"))
    again = Results(path, resume=True, commit="c")
    assert (FIRST, "sampled") in again and (SECOND, "greedy") not in again


def test_results_of_another_commit_or_of_a_run_that_is_not_gone_on_with_are_dropped(tmp_path: Path) -> None:
    for resume, commit in ((True, "other"), (False, "c")):
        Results(tmp_path / "results", resume=False, commit="c").add(RESULT)
        assert (FIRST, "greedy") not in Results(tmp_path / "results", resume=resume, commit=commit)


def test_uncommitted_changes_make_another_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("git")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").write_text("1")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m 1"):
        check_call(["git", *command.split()])
    heads = [current_commit()]
    for text in ("2", "3"):
        (tmp_path / "code").write_text(text)
        heads.append(current_commit())
    (tmp_path / "code").write_text("1")
    assert len(set(heads)) == 3 and current_commit() == heads[0]
