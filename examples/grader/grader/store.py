"""SQLite: what was handed in, and what came of it. A submission has one grade at most; the database sees to that."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel

from grader.compare import Comparison
from grader.errors import GraderError
from grader.injection import Find
from grader.models import ModelRun
from grader.prompts import Feedback
from grader.score import Score
from grader.validate import Validation

State = Literal["queued", "running", "done", "failed"]

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS submissions (
    id INTEGER PRIMARY KEY, batch TEXT NOT NULL, assignment TEXT NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL,
    notebook BLOB NOT NULL, state TEXT NOT NULL DEFAULT 'queued', error TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL, UNIQUE (batch, name));
CREATE TABLE IF NOT EXISTS grades (
    submission INTEGER PRIMARY KEY REFERENCES submissions (id), grade TEXT NOT NULL, finished REAL NOT NULL);
CREATE TABLE IF NOT EXISTS runs (
    submission INTEGER NOT NULL REFERENCES submissions (id), run TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS corrections (
    id INTEGER PRIMARY KEY, submission INTEGER NOT NULL REFERENCES submissions (id), section TEXT NOT NULL,
    points REAL NOT NULL, reason TEXT NOT NULL, time REAL NOT NULL);
"""


class Grade(BaseModel):
    """All that the four layers found. stopped: why the notebook's kernel was ended. seconds: from its start."""

    score: Score
    validations: tuple[Validation, ...]
    comparisons: tuple[Comparison, ...]
    feedback: Feedback | None
    finds: tuple[Find, ...] = ()
    stopped: str | None = None
    efficiency: float | None = None
    seconds: float = 0.0


class Correction(BaseModel):
    """By a person, who may give any points from 0 to the section's."""

    section: str
    points: float
    reason: str
    time: float


@dataclass(frozen=True, slots=True)
class Submission:
    """name: of the file. error: why it could not be graded."""

    id: int
    batch: str
    assignment: str
    name: str
    state: State
    error: str
    created: float


class Store:
    """One file, used from one thread."""

    def __init__(self, path: Path | str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        try:
            self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA foreign_keys = ON;" + SCHEMA)
        except BaseException:  # nobody gets this store, to close it
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def add(self, batch: str, assignment: str, name: str, notebook: bytes) -> int:
        """The new submission's id; that of the earlier one if the batch has this name with the same content."""
        digest = hashlib.sha256(notebook).hexdigest()
        self._db.execute(
            "INSERT OR IGNORE INTO submissions (batch, assignment, name, digest, notebook, created)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (batch, assignment, name, digest, notebook, time.time()),
        )
        row = self._db.execute("SELECT id, digest FROM submissions WHERE batch=? AND name=?", (batch, name)).fetchone()
        if row[1] != digest:
            raise GraderError(f"{name}: another notebook of this name is in the batch: rename one of them")
        return int(row[0])

    def claim(self, batch: str | None = None) -> Submission | None:
        """Take the oldest queued submission, of one batch or of all: no two callers get the same one."""
        row = self._db.execute(
            f"UPDATE submissions SET state='running' WHERE id = (SELECT id FROM submissions WHERE state='queued'"
            f" AND (?1 IS NULL OR batch=?1) ORDER BY id LIMIT 1) RETURNING {_COLUMNS}",
            (batch,),
        ).fetchone()
        return Submission(*row) if row else None

    def requeue(self, batch: str | None = None, states: Sequence[State] = ("running",)) -> int:
        """Queue again what is in these states: what ran when the grader ended, or what failed. Returns the number."""
        marks = ", ".join("?" for _ in states)
        return self._db.execute(
            f"UPDATE submissions SET state='queued', error='' WHERE (?1 IS NULL OR batch=?1) AND state IN ({marks})",
            (batch, *states),
        ).rowcount

    def finish(self, submission: int, grade: Grade, runs: Iterable[ModelRun]) -> None:
        """Grade, figures and state in one transaction. Raises sqlite3.IntegrityError if there is a grade already."""
        with _transaction(self._db):
            values = (submission, grade.model_dump_json(), time.time())
            self._db.execute("INSERT INTO grades VALUES (?, ?, ?)", values)
            self._db.executemany(
                "INSERT INTO runs VALUES (?, ?)", [(submission, run.model_dump_json()) for run in runs]
            )
            self._db.execute("UPDATE submissions SET state='done', error='' WHERE id=?", (submission,))

    def fail(self, submission: int, error: str) -> None:
        self._db.execute("UPDATE submissions SET state='failed', error=? WHERE id=?", (error[:500], submission))

    def notebook(self, submission: int) -> bytes:
        return bytes(self._db.execute("SELECT notebook FROM submissions WHERE id=?", (submission,)).fetchone()[0])

    def submission(self, submission: int) -> Submission | None:
        row = self._db.execute(f"SELECT {_COLUMNS} FROM submissions WHERE id=?", (submission,)).fetchone()
        return Submission(*row) if row else None

    def batch(self, batch: str) -> list[Submission]:
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM submissions WHERE batch=? ORDER BY id", (batch,))
        return [Submission(*row) for row in rows]

    def batches(self, limit: int = 50) -> list[dict[str, Any]]:
        """Newest first: batch, assignment, created, number of submissions and of those by state."""
        rows = self._db.execute(
            "SELECT batch, min(assignment), min(created), count(*), sum(state='done'), sum(state='failed')"
            " FROM submissions GROUP BY batch ORDER BY min(id) DESC LIMIT ?",
            (limit,),
        )
        names = ("batch", "assignment", "created", "submissions", "done", "failed")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def grade(self, submission: int) -> Grade | None:
        row = self._db.execute("SELECT grade FROM grades WHERE submission=?", (submission,)).fetchone()
        return Grade.model_validate_json(row[0]) if row else None

    def runs(self, submission: int | None = None) -> list[ModelRun]:
        """The requests to models, of one submission or of all."""
        rows = self._db.execute("SELECT run FROM runs WHERE ?1 IS NULL OR submission=?1", (submission,))
        return [ModelRun.model_validate_json(row[0]) for row in rows]

    def efficiencies(self) -> list[float]:
        rows = self._db.execute("SELECT json_extract(grade, '$.efficiency') FROM grades")
        return [row[0] for row in rows if row[0] is not None]

    def correct(self, submission: int, section: str, points: float, reason: str) -> None:
        """Raises GraderError if there is no such section, or the points are outside the rubric's."""
        grade = self.grade(submission)
        own = [one for one in grade.score.sections if one.section == section] if grade else []
        if not own:
            raise GraderError(f"no graded section {section!r}")
        if not 0 <= points <= own[0].maximum:
            raise GraderError(f"{section}: 0 to {own[0].maximum} points")
        self._db.execute(
            "INSERT INTO corrections (submission, section, points, reason, time) VALUES (?,?,?,?,?)",
            (submission, section, round(points, 2), reason[:500], time.time()),
        )

    def corrections(self, submission: int) -> list[Correction]:
        """Oldest first; the last one of a section counts."""
        rows = self._db.execute(
            "SELECT section, points, reason, time FROM corrections WHERE submission=? ORDER BY id", (submission,)
        )
        names = ("section", "points", "reason", "time")
        return [Correction.model_validate(dict(zip(names, row, strict=True))) for row in rows]


def final_points(score: Score, corrections: Sequence[Correction]) -> dict[str, float]:
    """Points by section, with the corrections."""
    return {one.section: one.points for one in score.sections} | {one.section: one.points for one in corrections}


_COLUMNS: Final = "id, batch, assignment, name, state, error, created"


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:  # also an interruption: the next one must find no open transaction
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
