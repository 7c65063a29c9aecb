"""Layer 2, check by check: what counts as equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from grader import compare
from grader.compare import Comparison, close, plots, share, table, text
from grader.notebook import Cell
from grader.rubric import Check, NumberCheck, PlotCheck, Rubric, Section, TableCheck, TextCheck
from grader.sandbox.values import CellRun, Execution, Number, Series, Table, Text, Value

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "equal"),
    [
        (1.0, 1.0, 0.0, True),
        (1.05, 1.0, 0.1, True),
        (1.2, 1.0, 0.1, False),
        (1050.0, 1000.0, 0.1, True),  # above 1 the tolerance is relative
        (1200.0, 1000.0, 0.1, False),
        (0.05, 0.0, 0.1, True),  # below 1 it is absolute
        (-1.0, 1.0, 0.1, False),
        (NAN, NAN, 0.0, True),
        (NAN, 1.0, 1e9, False),
        (1.0, NAN, 1e9, False),
        (INF, INF, 0.0, True),
        (-INF, INF, 0.1, False),
        (1.0, INF, 0.1, False),
    ],
)
def test_numbers_are_equal_within_the_tolerance(found: float, expected: float, tolerance: float, equal: bool) -> None:
    assert close(found, expected, tolerance) is equal


def columns(**values: Sequence[float | str | None]) -> Table:
    return Table(kind="table", columns={name: [*items] for name, items in values.items()})


@pytest.mark.parametrize(
    ("found", "names", "right", "reason"),
    [
        (columns(a=[1.0, 2.0], b=["x", None]), (), 1.0, ""),
        (columns(b=["x", None], a=[1.0, 2.0]), (), 1.0, ""),  # in another order
        (columns(a=[1.0, 2.0], b=["X. ", None], c=[1.0]), (), 1.0, ""),  # with one more, and a text that is equal
        (columns(a=[1.0, 2.5], b=["x", None]), (), 0.5, "different: a"),
        (columns(a=[1.0, 2.0]), (), 0.5, "different: b"),
        (columns(a=[1.0], b=["x"]), (), 0.0, "different: a, b"),
        (columns(a=[2.0, 1.0], b=["x", None]), ("b",), 1.0, ""),
        (columns(a=[1.0, 2.0], b=["x", 0.0]), ("a", "b"), 0.5, "different: b"),  # 0 is no missing value
        (columns(a=["1.0", "2.0"], b=["x", None]), (), 0.5, "different: a"),  # and a text no number
        (None, (), 0.0, "no table"),
    ],
)
def test_a_tables_share_is_that_of_its_equal_columns(
    found: Table | None, names: tuple[str, ...], right: float, reason: str
) -> None:
    check = TableCheck(kind="table", variable="t", columns=names)
    assert table(found, columns(a=[1.0, 2.0], b=["x", None]), check) == (right, reason)


def drawn(*y: float, kind: Literal["line", "bar", "points"] = "line") -> Series:
    return Series(kind=kind, x=[float(index) for index in range(len(y))], y=[*y])


@pytest.mark.parametrize(
    ("found", "expected", "right", "reason"),
    [
        ([drawn(1, 2)], [drawn(1, 2)], 1.0, ""),
        ([drawn(9), drawn(1, 2.0000001)], [drawn(1, 2)], 1.0, ""),
        ([drawn(1, 2, kind="bar")], [drawn(1, 2)], 0.0, "0 of 1 series drawn"),
        ([drawn(1, 2, 3)], [drawn(1, 2)], 0.0, "0 of 1 series drawn"),
        ([drawn(1)], [drawn(1), drawn(1)], 0.5, "1 of 2 series drawn"),  # one drawing counts once
        ([drawn(2), drawn(1)], [drawn(1), drawn(2)], 1.0, ""),
        ([], [drawn(1)], 0.0, "0 of 1 series drawn"),
        ([], [], 1.0, ""),
        ([drawn(1)], [], 0.0, "a plot that is not expected"),
    ],
)
def test_a_plots_share_is_that_of_its_series(
    found: list[Series], expected: list[Series], right: float, reason: str
) -> None:
    assert plots(found, expected, 1e-6) == (right, reason)


@pytest.mark.parametrize(
    ("found", "expected", "reason"),
    [
        ("Rome", "Rome", ""),
        ("  ROME!\n", "rome", ""),
        ("Palermo, Rome", "palermo rome", ""),
        ("ﬁne", "fine", ""),  # one Unicode form
        ("Roma", "Rome", "a different text"),
        ("mean 3.5", "mean 35", "a different text"),  # a point within a number counts
        ("", "", ""),
        (None, "Rome", "no text"),
        ("Rome", None, "no text"),
    ],
)
def test_texts_are_equal_without_case_white_space_and_punctuation(
    found: str | None, expected: str | None, reason: str
) -> None:
    assert text(found, expected) == (0.0 if reason else 1.0, reason)


def compared(check: Check, found: CellRun, expected: CellRun, *variables: Value | None) -> Comparison:
    """The one check of a section that is one cell. variables: `v` as found, and as expected."""
    rubric = Rubric(
        title="t",
        code_model="c",
        writing_model="w",
        sections=(Section(id="s", heading="S", points=1, checks=(check,)),),
    )
    cells = [Cell(0, "code", "", "s"), Cell(1, "code", "", None)]
    sides = []
    for run, value in zip((found, expected), variables or (None, None), strict=True):
        other = CellRun(1, "ran", "another section prints 77")
        sides.append(Execution((run, other), {"v": value} if value is not None else {}))
    only: Any = compare.compare(rubric, cells, sides[0], cells, sides[1])
    return Comparison.model_validate(only[0])


@pytest.mark.parametrize(
    ("printed", "right"),
    [
        ("mean: 3.5", 1.0),
        ("first 1, then 3.5", 1.0),  # the last one counts
        ("3.5 in all, of 2", 0.0),
        ("35e-1", 1.0),
        ("+3.5", 1.0),
        ("-3.5", 0.0),
        ("v3.5", 0.0),  # part of a name
        ("3.5x", 0.0),
        ("no number", 0.0),
        ("", 0.0),
    ],
)
def test_a_number_that_is_printed_is_the_sections_last_one(printed: str, right: float) -> None:
    check = NumberCheck(kind="number", tolerance=1e-9)
    found = compared(check, CellRun(0, "ran", printed), CellRun(0, "ran", "the mean is 3.5"))
    assert (found.section, found.check, found.share) == ("s", "number", right)


RAN = CellRun(0, "ran")
THREE, FOUR = Number(kind="number", value=3), Number(kind="number", value=4)
ROME = Text(kind="text", value="Rome")
LINE = CellRun(0, "ran", plots=(drawn(1, 2),))


@pytest.mark.parametrize(
    ("check", "found", "right", "reason"),
    [
        (NumberCheck(kind="number", variable="v"), THREE, 1.0, ""),
        (NumberCheck(kind="number", variable="v"), FOUR, 0.0, "4 instead of 3"),
        (NumberCheck(kind="number", variable="v"), ROME, 0.0, "no number"),
        (NumberCheck(kind="number", variable="v"), None, 0.0, "no number"),
    ],
)
def test_a_variable_is_compared_by_its_kind(check: Check, found: Value | None, right: float, reason: str) -> None:
    one = compared(check, RAN, RAN, found, THREE)
    assert (one.check, one.share, one.reason) == ("number v", right, reason)


def test_texts_tables_and_plots_are_found_where_the_check_says() -> None:
    named = TextCheck(kind="text", variable="v")
    assert compared(named, RAN, RAN, Text(kind="text", value="rome"), ROME).share == 1
    assert compared(TextCheck(kind="text"), CellRun(0, "ran", "Rome\n"), CellRun(0, "ran", "rome")).share == 1
    assert compared(TextCheck(kind="text"), RAN, CellRun(0, "ran", "rome")).reason == "no text"
    both = (columns(a=[1.0]), columns(a=[1.0]))
    assert compared(TableCheck(kind="table", variable="v"), RAN, RAN, *both).share == 1
    assert compared(TableCheck(kind="table", variable="v"), RAN, RAN, ROME, both[1]).reason == "no table"
    assert compared(PlotCheck(kind="plot"), LINE, LINE).share == 1
    assert compared(PlotCheck(kind="plot"), RAN, LINE).reason == "0 of 1 series drawn"


def test_a_sections_share_is_the_mean_of_its_checks() -> None:
    checks = [Comparison(section="s", check=str(index), share=value) for index, value in enumerate((1.0, 0.5, 0.0))]
    checks.append(Comparison(section="t", check="x", share=0.25))
    assert (share(checks, "s"), share(checks, "t"), share(checks, "u")) == (0.5, 0.25, None)
