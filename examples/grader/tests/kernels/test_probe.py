"""What layer 2 gets of plots and tables, read in a real kernel. One notebook, a cell per case."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import nbformat
import pytest

from grader.rubric import Limits
from grader.sandbox import CellRun, Execution, execute
from grader.sandbox.values import Table

PATIENT = Limits(cell_seconds=120, notebook_seconds=600)
FIRST = "import matplotlib.pyplot as plt, numpy as np, pandas as pd"

PLOTS: dict[str, tuple[str, list[tuple[str, list[float], list[float]]]]] = {
    "line": ("plt.plot([1, 2], [3, 4], 'r--')", [("line", [1, 2], [3, 4])]),
    "lines": ("plt.plot([1, 2], [[3, 5], [4, 6]])", [("line", [1, 2], [3, 4]), ("line", [1, 2], [5, 6])]),
    "names": ("plt.plot(['Rome', 'Oslo'], [3, 4])", [("line", [0, 1], [3, 4])]),
    "dates": ("plt.plot(pd.to_datetime(['2026-01-01', '2026-01-02']), [3, 4])", [("line", [20454, 20455], [3, 4])]),
    "gap": ("plt.plot([1, 2], [math.nan, 4])", [("line", [1, 2], [math.nan, 4])]),
    "bars": ("plt.bar(['a', 'b'], [3, 4])", [("bar", [0, 1], [3, 4])]),
    "histogram": ("plt.hist([1, 1, 2], bins=2)", [("bar", [1.25, 1.75], [2, 1])]),
    "points": ("plt.scatter([1, 2], [3, 4])", [("points", [1, 2], [3, 4])]),
    "two axes": (
        "_, (a, b) = plt.subplots(2)\na.plot([1], [2])\nb.plot([3], [4])",
        [("line", [1], [2]), ("line", [3], [4])],
    ),
    "pandas": ("pd.DataFrame({'a': [1, 2]}).plot()", [("line", [0, 1], [1, 2])]),
    "shown and saved": ("plt.plot([1], [2])\nplt.savefig('p.png')\nplt.show()", [("line", [1], [2])]),
    "area": ("plt.fill_between([1, 2], [3, 4])", []),
    "nothing": ("plt.figure()", []),
    "no numbers": ("plt.gca().get_lines = lambda: [1]", []),
}

TABLE = """
table = pd.DataFrame({
    'whole': [1, 2], 'share': [0.5, None], 'name': ['x', None], 'right': [True, False],
    'day': pd.to_datetime(['2026-01-01', '2026-01-02']), 7: pd.Categorical(['a', 'b']),
})
"""


@cache
def executed() -> Execution:
    sources = [f"import math\n{FIRST}", *(source for source, _ in PLOTS.values()), TABLE]
    content: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    return execute(content, ("table",), PATIENT)


def run(name: str) -> CellRun:
    return executed().cells[1 + [*PLOTS].index(name)]


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_read_as_its_data(name: str) -> None:
    found = [(one.kind, one.x, one.y) for one in run(name).plots]
    assert (run(name).error, repr(found)) == ("", repr([(kind, floats(x), floats(y)) for kind, x, y in PLOTS[name][1]]))


def floats(values: list[float]) -> list[float]:
    return [float(value) for value in values]


def test_a_table_is_read_column_by_column() -> None:
    table = executed().variables["table"]
    assert isinstance(table, Table)
    share = table.columns.pop("share")
    assert share[0] == 0.5 and isinstance(share[1], float) and math.isnan(share[1])
    missing = table.columns["name"].pop()
    assert missing is None or (isinstance(missing, float) and math.isnan(missing)), "as this pandas has it"
    assert table.columns == {
        "whole": [1.0, 2.0],
        "name": ["x"],
        "right": [1.0, 0.0],
        "day": ["2026-01-01 00:00:00", "2026-01-02 00:00:00"],
        "7": ["a", "b"],
    }
