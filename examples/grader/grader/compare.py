"""Layer 2: a section's outputs against those of the solution notebook."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from grader.notebook import Cell, normalise
from grader.rubric import Check, NumberCheck, PlotCheck, Rubric, Section, TableCheck, TextCheck
from grader.sandbox.values import Execution, Number, Scalar, Series, Table, Text

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]*\w)")


class Comparison(BaseModel):
    """One check. share: 0 to 1. reason: why it is not 1."""

    model_config = ConfigDict(frozen=True)

    section: str
    check: str
    share: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a section left in one notebook."""

    execution: Execution
    text: str
    plots: tuple[Series, ...]


def compare(
    rubric: Rubric, cells: Sequence[Cell], found: Execution, solution_cells: Sequence[Cell], expected: Execution
) -> tuple[Comparison, ...]:
    """Each check of each section, in the rubric's order."""
    return tuple(
        _check(section, check, outputs(section, cells, found), outputs(section, solution_cells, expected))
        for section in rubric.sections
        for check in section.checks
    )


def share(comparisons: Sequence[Comparison], section: str) -> float | None:
    """The mean of a section's checks; None without any."""
    own = [one.share for one in comparisons if one.section == section]
    return sum(own) / len(own) if own else None


def outputs(section: Section, cells: Sequence[Cell], execution: Execution) -> Outputs:
    own = {cell.index for cell in cells if cell.section == section.id}
    runs = [run for run in execution.cells if run.index in own]
    return Outputs(execution, "".join(run.text for run in runs), tuple(one for run in runs for one in run.plots))


def _check(section: Section, check: Check, found: Outputs, expected: Outputs) -> Comparison:
    match check:
        case NumberCheck():
            share, reason = number(_number(check, found), _number(check, expected), check.tolerance)
        case TableCheck():
            share, reason = table(_table(check, found), _table(check, expected), check)
        case PlotCheck():
            share, reason = plots(found.plots, expected.plots, check.tolerance)
        case TextCheck():
            share, reason = text(_text(check, found), _text(check, expected))
    return Comparison(section=section.id, check=named(check), share=share, reason=reason)


def named(check: Check) -> str:
    """Its kind, and its variable if it has one."""
    name = getattr(check, "variable", None)
    return f"{check.kind} {name}" if name else check.kind


def evidence(check: Check, found: Outputs) -> float | Table | tuple[Series, ...] | str | None:
    """What a check compares; None or () if there is nothing."""
    match check:
        case NumberCheck():
            return _number(check, found)
        case TableCheck():
            return _table(check, found)
        case PlotCheck():
            return found.plots
        case TextCheck():
            return _text(check, found)


def number(found: float | None, expected: float | None, tolerance: float) -> tuple[float, str]:
    if found is None or expected is None:
        return 0.0, "no number"
    return (1.0, "") if close(found, expected, tolerance) else (0.0, f"{found:.6g} instead of {expected:.6g}")


def table(found: Table | None, expected: Table | None, check: TableCheck) -> tuple[float, str]:
    """The share of the columns that are equal; their order does not count."""
    if found is None or expected is None:
        return 0.0, "no table"
    names = check.columns or tuple(expected.columns)
    wrong = [
        name for name in names if not _column(found.columns.get(name), expected.columns.get(name), check.tolerance)
    ]
    return 1 - len(wrong) / len(names) if names else 1.0, f"different: {', '.join(wrong)}"[:300] if wrong else ""


def plots(found: Sequence[Series], expected: Sequence[Series], tolerance: float) -> tuple[float, str]:
    """The share of the expected series that are drawn; each found series counts once."""
    if not expected:
        return (0.0, "a plot that is not expected") if found else (1.0, "")
    left = list(found)
    matched = 0
    for wanted in expected:
        same = next((one for one in left if _series(one, wanted, tolerance)), None)
        if same is not None:
            left.remove(same)
            matched += 1
    reason = "" if matched == len(expected) else f"{matched} of {len(expected)} series drawn"
    return matched / len(expected), reason


def text(found: str | None, expected: str | None) -> tuple[float, str]:
    if found is None or expected is None:
        return 0.0, "no text"
    return (1.0, "") if normalise(found) == normalise(expected) else (0.0, "a different text")


def close(found: float, expected: float, tolerance: float) -> bool:
    """Within `tolerance`, relative for values above 1. NaN equals NaN, and infinite values only themselves."""
    if math.isnan(found) or math.isnan(expected):
        return math.isnan(found) and math.isnan(expected)
    if math.isinf(found) or math.isinf(expected):
        return found == expected
    return abs(found - expected) <= tolerance * max(1.0, abs(expected))


def _column(found: list[Scalar] | None, expected: list[Scalar] | None, tolerance: float) -> bool:
    if found is None or expected is None or len(found) != len(expected):
        return False
    return all(_scalar(one, other, tolerance) for one, other in zip(found, expected, strict=True))


def _scalar(found: Scalar, expected: Scalar, tolerance: float) -> bool:
    if isinstance(found, float) and isinstance(expected, float):
        return close(found, expected, tolerance)
    if isinstance(found, str) and isinstance(expected, str):
        return normalise(found) == normalise(expected)
    return found is expected


def _series(found: Series, expected: Series, tolerance: float) -> bool:
    return (
        found.kind == expected.kind
        and _column([*found.x], [*expected.x], tolerance)
        and _column([*found.y], [*expected.y], tolerance)
    )


def _number(check: NumberCheck, outputs: Outputs) -> float | None:
    if check.variable is None:
        printed = NUMBER.findall(outputs.text)
        return float(printed[-1]) if printed else None
    value = outputs.execution.variables.get(check.variable)
    return value.value if isinstance(value, Number) else None


def _table(check: TableCheck, outputs: Outputs) -> Table | None:
    value = outputs.execution.variables.get(check.variable)
    return value if isinstance(value, Table) else None


def _text(check: TextCheck, outputs: Outputs) -> str | None:
    if check.variable is None:
        return outputs.text or None
    value = outputs.execution.variables.get(check.variable)
    return value.value if isinstance(value, Text) else None
