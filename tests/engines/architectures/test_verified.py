"""What counts as verified is what these tests hand over; what disagg knows of model types is docs/architectures.md."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest

from disagg.planning.verdicts import FILE, SERIES, VERIFIED, verified
from tests.surveys.tables import known, read_table, text_type, write_verdicts

PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"


def test_verified_architectures_are_those_of_the_tests() -> None:
    assert {text_type(entry) for entry in known().values()} == VERIFIED


def test_what_disagg_knows_of_model_types_is_what_the_table_says(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.toml"
    write_verdicts(PAGE, file)
    assert file.read_text(encoding="utf-8") == FILE.read_text(encoding="utf-8")


def test_every_row_that_real_servers_made_is_exact_or_patched() -> None:
    rows = read_table(PAGE)
    assert {name for name in known() if rows[name]["transformers"] not in ("exact", "patched")} == set()


@pytest.mark.parametrize(
    ("architecture", "versions", "is_verified"),
    [
        ("llama", {"transformers": "5.23.0", "torch": "2.13.0"}, True),
        ("llama", {"mlx-lm": "0.32.9", "mlx": "0.40", "transformers": "5.23.4"}, True),
        ("llama", {"vllm": "0.32.0+cpu", "torch": "2.13.0"}, True),
        ("llama", {"vllm": "0.33.0"}, False),
        ("llama", {"mlx-lm": "0.33.0", "transformers": "5.23.0"}, False),
        ("llama", {"mlx-lm": "0.320.0"}, False),
        ("afmoe", {"transformers": "5.23.0"}, False),
    ],
)
def test_an_architecture_is_verified_on_the_versions_that_the_tests_run_with(
    architecture: str, versions: Mapping[str, str], is_verified: bool
) -> None:
    assert verified(architecture, versions) is is_verified


@pytest.mark.parametrize("name", ["transformers", "mlx-lm"])
def test_the_tests_run_with_the_versions_that_count_as_verified(name: str) -> None:
    assert version(name).startswith(f"{SERIES[name]}.")
