"""What both tables of docs/architectures.md share: the configurations that have rows, and rows in a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import tiny_models
from tests.engines.architectures.configs import CONFIGS, config

FIRST, LAST = "<!-- known -->\n", "<!-- end of known -->\n"
"""Lines around the table of the known architectures."""
GOOD = ("exact", "patched")
"""Verdicts of architectures that are handed over."""


def known() -> Mapping[str, dict[str, Any]]:
    plain = {name: {**tiny_models.COMMON, **entry} for name, entry in tiny_models.ARCHITECTURES.items()}
    return plain | {name: config(name) for name in CONFIGS}


def write_rows(page: Path, first: str, last: str, head: str, made: dict[str, str]) -> None:
    """Put rows into the table of the page between two lines, in place of those with the same names."""
    before, table, after = _parts(page, first, last)
    rows = {_cells(line)[0]: f"{line}\n" for line in table.splitlines()[2:]} | made
    page.write_text(before + first + head + "".join(rows.values()) + last + after, "utf-8")


def read_rows(page: Path, first: str, last: str) -> dict[str, list[str]]:
    """The rows of the table of the page between two lines: the cells after the name, by name."""
    rows = [_cells(line) for line in _parts(page, first, last)[1].splitlines()[2:]]
    return {name: cells for name, *cells in rows}


def write_verified(page: Path, file: Path) -> None:
    """Make `file` the list of the model types whose rows in the table of the page are exact, or patched."""
    rows = read_rows(page, FIRST, LAST)
    types = sorted({text_type(known()[name]) for name, (_, verdict, *_) in rows.items() if verdict in GOOD})
    file.write_text("".join(f"{one}\n" for one in types), "utf-8")


def text_type(entry: Mapping[str, Any]) -> str:
    """The model type of the part that reads text."""
    return str(entry.get("text_config", entry)["model_type"])


def _parts(page: Path, first: str, last: str) -> tuple[str, str, str]:
    before, _, rest = page.read_text(encoding="utf-8").partition(first)
    table, _, after = rest.partition(last)
    return before, table, after


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def short(text: str, folder: Path) -> str:
    """What went wrong with the model in `folder`, for a cell of a table: one line, without the folder's name."""
    line = " ".join(text.split()).replace("|", "/").removeprefix(f"{folder}: ").replace(str(folder), "the model")
    return line if len(line) <= 180 else line[:177] + "..."
