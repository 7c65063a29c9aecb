"""Notebooks within bounds, and their cells by section."""

from __future__ import annotations

import json
import re
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import nbformat

from grader.errors import NotebookError
from grader.rubric import Section

MAX_BYTES: Final = 4 << 20
MAX_CELLS: Final = 300
MAX_SOURCE: Final = 300_000
MAX_DEPTH: Final = 40


@dataclass(frozen=True, slots=True)
class Cell:
    """index: its place in the notebook, from 0. section: its section's id; None before the first one."""

    index: int
    kind: Literal["code", "markdown"]
    source: str
    section: str | None


def read(data: bytes) -> Any:
    """A valid notebook of format 4 without outputs. Raises NotebookError."""
    if len(data) > MAX_BYTES:
        raise NotebookError(f"the file has {len(data):,} bytes, more than {MAX_BYTES:,}")
    try:
        text = data.decode("utf-8")
        _check_depth(text)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nbformat, about cells without an id
            notebook = nbformat.reads(text, as_version=4)
            nbformat.validate(notebook)
    except (UnicodeDecodeError, json.JSONDecodeError, nbformat.reader.NotJSONError) as error:
        raise NotebookError("the file is no notebook: it is not JSON") from error
    except (nbformat.ValidationError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotebookError(f"the file is no valid notebook: {str(error).splitlines()[0][:200]}") from error
    if len(notebook.cells) > MAX_CELLS:
        raise NotebookError(f"the notebook has {len(notebook.cells)} cells, more than {MAX_CELLS}")
    if sum(len(cell.source) for cell in notebook.cells) > MAX_SOURCE:
        raise NotebookError(f"the notebook's cells have more than {MAX_SOURCE:,} characters")
    if any("\ud800" <= character <= "\udfff" for cell in notebook.cells for character in cell.source):
        raise NotebookError("the notebook has characters that are none: half of a surrogate pair")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def cells(notebook: Any, sections: Sequence[Section]) -> tuple[Cell, ...]:
    """Its code and Markdown cells, each with its section: that of the last heading before it that the rubric names."""
    headings = {normalise(section.heading): section.id for section in sections}
    found: list[Cell] = []
    current: str | None = None
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            for heading in _headings(cell.source):
                current = headings.get(normalise(heading), current)
        if cell.cell_type in ("code", "markdown"):
            found.append(Cell(index, cell.cell_type, cell.source, current))
    return tuple(found)


def normalise(text: str) -> str:
    """Without case, punctuation and repeated white space, in one Unicode form."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.sub(r"[^\w\s.+-]|[.](?!\d)", " ", folded).split())


def _headings(source: str) -> list[str]:
    return re.findall(r"^ {0,3}#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*$", source, re.MULTILINE)


def _check_depth(text: str) -> None:
    """json and nbformat recurse: a file of brackets would exhaust the stack."""
    depth = 0
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[{\]}]', text):
        bracket = found.group()
        if bracket in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise NotebookError(f"the file is no notebook: more than {MAX_DEPTH} levels of brackets")
        elif bracket in "]}":
            depth -= 1
