"""The table of docs/architectures.md, the configurations that have rows in it, and what disagg itself reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.engines.model.architectures.patches import PATCHES
from disagg.planning.verdicts import FILE
from tests import tiny_models
from tests.engines.architectures.configs import CONFIGS, config

FIRST, LAST = "<!-- table -->\n", "<!-- end of table -->\n"
FIRST_PATCH, LAST_PATCH = "<!-- patches -->\n", "<!-- end of patches -->\n"
GOOD = ("exact", "patched")
"""Verdicts of architectures that are handed over."""
COLUMNS: Mapping[str, str] = {
    "layers": "layers",
    "transformers": "transformers",
    "splits": "splits",
    "vllm": "vLLM",
    "ranks": "vLLM, two ranks",
    "difference": "largest difference",
    "bytes per token": "bytes per token",
    "bytes of states": "bytes of states",
}
Row = dict[str, str]
"""Cells by the keys of COLUMNS."""


def known() -> Mapping[str, dict[str, Any]]:
    plain = {name: {**tiny_models.COMMON, **entry} for name, entry in tiny_models.ARCHITECTURES.items()}
    return plain | {name: config(name) for name in CONFIGS}


def read_table(page: Path) -> dict[str, Row]:
    rows = [_cells(line) for line in _parts(page)[1].splitlines()[2:]]
    return {name: dict(zip(COLUMNS, cells, strict=True)) for name, *cells in rows}


def write_cells(page: Path, name: str, cells: Mapping[str, str]) -> None:
    """Put cells into the row of this name, a new one if there is none."""
    before, _, after = _parts(page)
    rows = read_table(page)
    rows[name] = {column: {**rows.get(name, {}), **cells}.get(column, "") for column in COLUMNS}
    head = f"| model type | {' | '.join(COLUMNS.values())} |\n|{' --- |' * (len(COLUMNS) + 1)}\n"
    lines = (f"| {one} | {' | '.join(row.values())} |\n" for one, row in rows.items())
    page.write_text(before + FIRST + head + "".join(lines) + LAST + after, "utf-8")


def write_verdicts(page: Path, file: Path = FILE) -> None:
    """Write disagg's own list from the table of the page: of each model type of the part that reads text. It is refused
    if all of its rows are: a row with another name than the type's is of an unusual configuration. Of the others it is
    patched if one is. served: real servers were compared."""
    rows, entries = read_table(page), known()
    found: dict[str, dict[str, str]] = {}
    for name, row in rows.items():
        kind = text_type(entries[name]) if name in entries else name
        verdicts = found.setdefault(kind, {})
        for engine in ("transformers", "vllm"):
            if row[engine]:
                verdicts[engine] = max(verdicts.get(engine, row[engine]), row[engine], key=_rank)
        if name in entries and row["transformers"] in GOOD:
            verdicts["served"] = "true"
    file.write_text("\n".join(_table(kind, found[kind]) for kind in sorted(found)), "utf-8")


def _rank(verdict: str) -> int:
    return GOOD.index(verdict) + 1 if verdict in GOOD else 0


def _table(kind: str, verdicts: Mapping[str, str]) -> str:
    lines = [f"{key} = {value}" if value == "true" else f'{key} = """{value}"""' for key, value in verdicts.items()]
    return "".join(f"{line}\n" for line in (f"[{kind}]", *lines))


def write_patches(page: Path) -> None:
    """Write the page's table of patches from disagg's."""
    before, _, rest = page.read_text(encoding="utf-8").partition(FIRST_PATCH)
    lines = (
        f"| {patch.what} | {patch.framework} {patch.series} | {', '.join(patch.needed_by)} |\n" for patch in PATCHES
    )
    head = "| difference | where | needed by |\n| --- | --- | --- |\n"
    after = rest.partition(LAST_PATCH)[2]
    page.write_text(before + FIRST_PATCH + head + "".join(lines) + LAST_PATCH + after, "utf-8")


def text_type(entry: Mapping[str, Any]) -> str:
    """The model type of the part that reads text."""
    return str(entry.get("text_config", entry)["model_type"])


def _parts(page: Path) -> tuple[str, str, str]:
    before, _, rest = page.read_text(encoding="utf-8").partition(FIRST)
    table, _, after = rest.partition(LAST)
    return before, table, after


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def short(text: str, folder: Path) -> str:
    """What went wrong with the model in `folder`, for a cell of a table: one line, without the folder's name."""
    line = " ".join(text.split()).replace("|", "/").removeprefix(f"{folder}: ").replace(str(folder), "the model")
    return line if len(line) <= 180 else line[:177] + "..."
