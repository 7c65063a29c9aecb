"""What the page shows of a notebook's layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grader.models import ModelRun
from grader.pipeline import Layer, compared, validated
from grader.store import Grade


def progress_line(state: str, detail: str, runs: Iterable[ModelRun] = ()) -> str:
    """A layer's state, what it found, and what its models took."""
    parts = (detail, *dict.fromkeys(f"{one.model} on {one.hosts}{one.speed}" for one in runs))
    return " ".join([state, "; ".join(part for part in parts if part)]).strip()


def running(line: str) -> bool:
    """Whether this is the line of a layer that has begun and not ended."""
    return line.split(" ", 1)[0] == "running"


def graded(grade: Grade, runs: Sequence[ModelRun]) -> dict[Layer, str]:
    """The layers of a notebook that is graded, also by an earlier program."""
    code = [one for one in runs if one.role == "code"]
    writing = [one for one in runs if one.role != "code"]
    return {
        "validation": progress_line("done", validated(grade.validations)),
        "outputs": progress_line("done", compared(grade.comparisons)),
        "code": progress_line("done", _errors(code), code),
        "writing": progress_line("done", _errors(writing), writing),
    }


def _errors(runs: Iterable[ModelRun]) -> str:
    return "; ".join(one.error for one in runs if one.error)
