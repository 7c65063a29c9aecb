"""What counts as verified is what these tests hand over, and every row of docs/architectures.md is among it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest

from disagg.engines.model.architectures.verified import FILE, SERIES, VERIFIED, verified
from tests.surveys.tables import known, text_type, write_verified

PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"


def test_verified_architectures_are_those_of_the_tests() -> None:
    assert {text_type(entry) for entry in known().values()} == VERIFIED


def test_what_counts_as_verified_is_what_the_table_says(tmp_path: Path) -> None:
    file = tmp_path / "verified.txt"
    write_verified(PAGE, file)
    assert file.read_text(encoding="utf-8") == FILE.read_text(encoding="utf-8")


def test_forty_rows_of_the_table_are_exact_or_patched_and_verified() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("<!-- known -->")[2].partition("<!-- end of known -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    exact = [name for name, _, verdict, *_ in rows[2:] if verdict in ("exact", "patched")]
    assert len(exact) >= 40
    assert {text_type(known()[name]) for name in exact} <= VERIFIED


@pytest.mark.parametrize(
    ("architecture", "versions", "is_verified"),
    [
        ("llama", {"transformers": "5.23.0", "torch": "2.13.0"}, True),
        ("llama", {"mlx-lm": "0.32.9", "mlx": "0.40", "transformers": "5.23.4"}, True),
        ("llama", {"vllm": "0.32.0+cpu", "torch": "2.13.0"}, True),
        ("llama", {"vllm": "0.33.0"}, False),
        ("llama", {"mlx-lm": "0.33.0", "transformers": "5.23.0"}, False),
        ("llama", {"mlx-lm": "0.320.0"}, False),
        ("olmo_hybrid", {"transformers": "5.23.0"}, False),
    ],
)
def test_an_architecture_is_verified_on_the_versions_that_the_tests_run_with(
    architecture: str, versions: Mapping[str, str], is_verified: bool
) -> None:
    assert verified(architecture, versions) is is_verified


@pytest.mark.parametrize("name", ["transformers", "mlx-lm"])
def test_the_tests_run_with_the_versions_that_count_as_verified(name: str) -> None:
    assert version(name).startswith(f"{SERIES[name]}.")
