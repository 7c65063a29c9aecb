"""docs/python-api.md: its code runs, its options are those of the API with their defaults and bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg import errors
from disagg.api.base import bounds
from disagg.api.requests import GenerateBody
from disagg.api.sampling import Sampling
from disagg.inference.metrics import TTFTParts
from disagg.inference.options import GenerateOptions
from disagg.token import TOKEN_FILE_VARIABLE
from tests.fleets import RunningFleet

PAGE = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_runs(
    tiny_fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    monkeypatch.chdir(tiny_fleet.folder)
    monkeypatch.setenv("DISAGG_CONFIG", str(tiny_fleet.fleet.path))
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tiny_fleet.folder / "token"))
    code = BLOCKS[number].replace('"qwen"', '"tiny"')
    exec(compile("import disagg\n" + code, f"python-api.md block {number}", "exec"), {})
    assert capsys.readouterr().out or "print(" not in code


def rows(first_header: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has this header, by the name in that column."""
    (table,) = re.findall(rf"^\| {first_header} \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name.strip("`"): cells for name, *cells in split}


def shown_bounds(kind: type[Any], field: str) -> str:
    limits = bounds(kind, field)
    if limits.minimum is None:
        return ""
    if limits.exclusive_minimum:
        return f"over {limits.minimum:g}, to {limits.maximum:g}"
    return f"{limits.minimum} to {limits.maximum}"


def test_the_options_are_those_of_the_api() -> None:
    assert list(rows("option")) == list(GenerateOptions.__annotations__)
    fields = list(Sampling.__struct_fields__)
    assert list(rows("option"))[: len(fields)] == fields


@pytest.mark.parametrize("field", msgspec.structs.fields(Sampling), ids=lambda field: field.name)
def test_an_option_has_the_default_the_bounds_and_the_meaning_of_the_api(field: msgspec.structs.FieldInfo) -> None:
    default = field.default
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    limits = shown_bounds(Sampling, field.name)
    assert rows("option")[field.name] == [shown, limits, bounds(Sampling, field.name).description]


def test_the_timeout_has_the_bounds_of_the_deadline() -> None:
    default, limits, _ = rows("option")["timeout"]
    assert float(default) == GenerateBody(model="m", prompt="x").deadline_s
    assert limits == shown_bounds(GenerateBody, "deadline_s")


def test_the_parts_of_ttft_are_all_named() -> None:
    assert all(f"`{name}`" in PAGE for name in TTFTParts.__dataclass_fields__)


def test_the_errors_exist() -> None:
    assert all(issubclass(getattr(errors, name), errors.DisaggError) for name in rows("error"))
