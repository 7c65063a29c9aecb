"""Runs inside the kernel, before the student's first cell: `install(SETTINGS)`. Imports nothing of the grader.

After each cell it displays the data of the plots and the values of the variables that the rubric names. Student code
can change it as it can print any output: what it reports is evidence about the student's own work, no more.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, TypedDict

PLOTS_TYPE = "application/x-grader-plots"
VARIABLES_TYPE = "application/x-grader-variables"
CLOSE_S = 60


class Settings(TypedDict):
    """shared: the folder of the sockets. ready: the file in it that tells the jail that they are open."""

    shared: str
    ready: str
    variables: list[str]
    cell_output: int
    max_items: int
    max_columns: int
    max_text: int


class OutputLimitError(RuntimeError):
    """A cell printed too much."""


def install(settings: Settings) -> None:
    from IPython import get_ipython  # type: ignore[attr-defined,unused-ignore]  # if it is installed
    from IPython.display import publish_display_data

    shell: Any = get_ipython()  # type: ignore[no-untyped-call,unused-ignore]  # likewise
    written = [0]
    sent: dict[str, str] = {}

    def before(_info: object) -> None:
        written[0] = 0
        bound(sys.stdout, written, settings["cell_output"])
        bound(sys.stderr, written, settings["cell_output"])

    def after(_result: object) -> None:
        if plots := plot_data(settings):
            publish_display_data({PLOTS_TYPE: json.dumps(plots)})
        present = [name for name in settings["variables"] if name in shell.user_ns]
        values = {name: encode(shell.user_ns[name], settings) for name in present}
        changed = {name: value for name, value in values.items() if sent.get(name) != json.dumps(value)}
        if changed:
            sent.update({name: json.dumps(value) for name, value in changed.items()})
            publish_display_data({VARIABLES_TYPE: json.dumps(changed)})

    # Figures stay open until `after` has read them, and nothing is drawn.
    shell.register_magic_function(lambda _line: None, "line", "matplotlib")
    warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
    shell.events.register("pre_run_cell", before)
    shell.events.register("post_run_cell", after)
    close(settings)


def close(settings: Settings) -> None:
    """Have the jail make the folder of the sockets read-only, and wait until it is: student code comes after that."""
    (Path(settings["shared"]) / settings["ready"]).touch()
    deadline = time.monotonic() + CLOSE_S
    while os.access(settings["shared"], os.W_OK):
        if time.monotonic() > deadline:
            raise TimeoutError("the jail does not close the folder of the sockets")
        time.sleep(0.005)


def bound(stream: Any, written: list[int], limit: int) -> None:
    """Make `stream.write` fail once `limit` characters are written. IPython replaces this method while a cell runs, so
    that this is done again at the beginning of each."""
    write = stream.write
    if getattr(write, "bounded", False):
        return

    def bounded(text: str) -> int:
        room = limit - written[0]
        written[0] += len(text)
        if len(text) <= room:
            return int(write(text) or 0)
        if room > 0:
            write(text[:room])
        raise OutputLimitError(f"more than {limit} characters of output")

    bounded.bounded = True  # type: ignore[attr-defined]  # not bounded twice
    stream.write = bounded


def encode(value: Any, settings: Settings) -> dict[str, Any]:
    """A value as JSON, cut to the limits."""
    try:
        return _encode(value, settings)
    except Exception:  # noqa: BLE001  a value of student code may raise anything when it is read
        return {"kind": "other", "type": "unreadable"}


def _encode(value: Any, settings: Settings) -> dict[str, Any]:
    pandas, numpy = sys.modules.get("pandas"), sys.modules.get("numpy")
    if numpy is not None and (isinstance(value, numpy.generic) or (type(value) is numpy.ndarray and value.ndim == 0)):
        value = value.item()
    if type(value) in (int, float, bool):
        return {"kind": "number", "value": float(value)}
    if type(value) is str:
        return {"kind": "text", "value": value[: settings["max_text"]]}
    if pandas is not None and type(value) is pandas.DataFrame:
        columns = list(value.columns)[: settings["max_columns"]]
        return {"kind": "table", "columns": {str(name): scalars(value[name].tolist(), settings) for name in columns}}
    if (pandas is not None and type(value) is pandas.Series) or (numpy is not None and type(value) is numpy.ndarray):
        return {"kind": "list", "items": scalars(list(getattr(value, "ravel", value.tolist)()), settings)}
    if type(value) in (list, tuple):
        return {"kind": "list", "items": scalars(list(value), settings)}
    return {"kind": "other", "type": type(value).__name__[:200]}


def scalars(values: list[Any], settings: Settings) -> list[float | str | None]:
    return [scalar(value) for value in values[: settings["max_items"]]]


def scalar(value: Any) -> float | str | None:
    if value is None:
        return None
    if hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, (int, float)) else str(value)[:200]


def plot_data(settings: Settings) -> list[dict[str, Any]]:
    """The series of all open figures, which are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    try:
        axes = [one for number in pyplot.get_fignums() for one in pyplot.figure(number).axes]
        return [series for one in axes for series in axes_data(one, settings["max_items"])]
    except Exception:  # noqa: BLE001  student code may have changed what it drew into anything
        return []
    finally:
        pyplot.close("all")


def axes_data(axes: Any, limit: int) -> list[dict[str, Any]]:
    found = [("line", line.get_xdata(orig=False), line.get_ydata(orig=False)) for line in axes.get_lines()]
    bars = [patch for patch in axes.patches if hasattr(patch, "get_height")]
    if bars:
        centres = [bar.get_x() + bar.get_width() / 2 for bar in bars]
        found.append(("bar", centres, [bar.get_height() for bar in bars]))
    for points in axes.collections:
        if type(points).__name__ != "PathCollection":  # areas and error bars have no points
            continue
        offsets = points.get_offsets()
        found.append(("points", [x for x, _ in offsets], [y for _, y in offsets]))
    return [
        {"kind": kind, "x": [float(value) for value in x][:limit], "y": [float(value) for value in y][:limit]}
        for kind, x, y in found
    ]
