"""What counts as verified is what these tests hand over, and every row of docs/architectures.md is among it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg.engines.model.architectures.verified import VERIFIED
from scripts.tables import known

PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"


def test_verified_architectures_are_those_of_the_tests() -> None:
    assert {text_type(entry) for entry in known().values()} == VERIFIED


def test_forty_rows_of_the_table_are_exact_or_patched_and_verified() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("<!-- known -->")[2].partition("<!-- end of known -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    exact = [name for name, _, verdict, *_ in rows[2:] if verdict in ("exact", "patched")]
    assert len(exact) >= 40
    assert {text_type(known()[name]) for name in exact} <= VERIFIED


def text_type(entry: Mapping[str, Any]) -> str:
    return str(entry.get("text_config", entry)["model_type"])
