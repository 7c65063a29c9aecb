"""The results of a run of the matrix, kept in a file row by row, so that a run that was interrupted can go on."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.faults.cells import Cell, cells
from tests.faults.matrix import Result

Row = tuple[Cell, str]
"""A cell and the name of the sampling."""


class Results:
    """Results by row. The first line of the file names the commit and its uncommitted changes: those of other code are
    not gone on with."""

    def __init__(self, path: Path, *, resume: bool, commit: str | None = None) -> None:
        self._path = path
        self._results: dict[tuple[str, str], Result] = {}
        head = json.dumps({"commit": commit if commit is not None else current_commit()})
        lines = path.read_text(encoding="utf-8").splitlines() if resume and path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + "\n", encoding="utf-8")
        if lines[:1] == [head]:
            for result in _read(lines[1:]):
                self.add(result)

    def __contains__(self, row: Row) -> bool:
        return (row[0].id, row[1]) in self._results

    def __getitem__(self, row: Row) -> Result:
        return self._results[row[0].id, row[1]]

    def add(self, result: Result) -> None:
        self._results[result.cell.id, result.sampling] = result
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(result), "cell": result.cell.id}) + "\n")


def _read(lines: list[str]) -> Iterator[Result]:
    known = {cell.id: cell for cell in cells()}
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError:  # the run ended in mid-write
            continue
        if fields["cell"] in known:
            yield Result(**{**fields, "cell": known[fields["cell"]]})


def current_commit() -> str:
    """HEAD, and what differs from it."""
    state = [_git("rev-parse", "HEAD"), _git("status", "--porcelain"), _git("diff", "HEAD")]
    commit, changes = state[0].strip(), "".join(state[1:])
    return f"{commit}+{hashlib.sha256(changes.encode()).hexdigest()[:12]}" if changes else commit


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout
