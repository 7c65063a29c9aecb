"""CSV of a batch."""

from __future__ import annotations

import csv
import io

from grader.rubric import Rubric
from grader.store import Store, final_points


def table(store: Store, batch: str, rubric: Rubric) -> str:
    """One row per notebook: points of each section, with corrections, and what a person should look at."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    sections = [section.id for section in rubric.sections]
    writer.writerow(["notebook", "state", "points", "maximum", *sections, "review", "summary"])
    for submission in store.batch(batch):
        grade = store.grade(submission.id)
        if grade is None:
            writer.writerow([safe(submission.name), submission.state, "", rubric.points, *[""] * len(sections)])
            continue
        points = final_points(grade.score, store.corrections(submission.id))
        reasons = [
            *grade.score.review,
            *(f"{one.section}: {text}" for one in grade.score.sections for text in one.review),
        ]
        row = [safe(submission.name), submission.state, round(sum(points.values()), 2), rubric.points]
        row += [points.get(section, "") for section in sections]
        writer.writerow([*row, safe("; ".join(reasons)), safe(grade.feedback.summary if grade.feedback else "")])
    return out.getvalue()


def safe(text: str) -> str:
    """A text that spreadsheets do not take for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
