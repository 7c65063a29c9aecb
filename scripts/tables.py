"""What both tables of docs/architectures.md share: the configurations that have rows, and rows in a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import tiny_models
from tests.engines.architectures.configs import CONFIGS, config


def known() -> Mapping[str, dict[str, Any]]:
    plain = {name: {**tiny_models.COMMON, **entry} for name, entry in tiny_models.ARCHITECTURES.items()}
    return plain | {name: config(name) for name in CONFIGS}


def write_rows(page: Path, first: str, last: str, head: str, made: dict[str, str]) -> None:
    """Put rows into the table of the page between two lines, in place of those with the same names."""
    before, _, rest = page.read_text(encoding="utf-8").partition(first)
    table, _, after = rest.partition(last)
    rows = {line.split(" | ")[0].strip("| "): f"{line}\n" for line in table.splitlines()[2:]} | made
    page.write_text(before + first + head + "".join(rows.values()) + last + after, "utf-8")


def short(text: str, folder: Path) -> str:
    """What went wrong with the model in `folder`, for a cell of a table: one line, without the folder's name."""
    line = " ".join(text.split()).replace("|", "/").removeprefix(f"{folder}: ").replace(str(folder), "the model")
    return line if len(line) <= 180 else line[:177] + "..."
