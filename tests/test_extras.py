"""The extras of disagg, and what is said where one is not installed."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from disagg.cli import app
from disagg.errors import UsageError
from disagg.extras import MODULES, install, require
from tests.cli.commandline import run, write_fleet

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in modules else find_spec(name))


def brought(extra: str) -> set[NormalizedName]:
    """The packages of an extra, with those of the extras that it names."""
    found = set[NormalizedName]()
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        found |= {canonicalize_name(requirement.name)}
        for other in requirement.extras if requirement.name == "disagg" else ():
            found |= brought(other)
    return found


@pytest.mark.parametrize("extra", sorted(MODULES))
def test_an_extra_brings_its_modules(extra: str) -> None:
    assert {canonicalize_name(module) for module in MODULES[extra]} <= brought(extra)


def test_no_hint_names_a_package_index() -> None:
    for path in [
        *ROOT.glob("*.md"),
        *(one for part in ("disagg", "benchmarks", "docs", "scripts") for one in (ROOT / part).rglob("*")),
    ]:
        if path.suffix in (".py", ".md", ".sh"):
            assert not re.search(r"install (--\S+ )*['\"]?disagg\b", path.read_text(encoding="utf-8")), path


def test_all_that_is_missing_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    require("prefill", "decode")
    without(monkeypatch, "uvicorn", "mlx")
    with pytest.raises(UsageError, match="not installed here: uvicorn, mlx") as caught:
        require("prefill", "decode", "prefill")
    assert caught.value.hint == install("prefill", "decode")
    assert caught.value.hint.startswith("pip install '.[prefill,decode]' in a clone of disagg ")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("start",), "prefill,decode"),
        (("demo",), "prefill,decode"),
        (("serve",), "gateway"),
        (("bench", "handoff"), "prefill"),
        (("verify", "tiny", "--here"), "decode,prefill"),
    ],
)
def test_a_command_that_needs_an_extra_names_it_in_one_line(
    words: tuple[str, ...],
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    without(monkeypatch, "uvicorn")
    assert run("--config", write_fleet(tmp_path), *words) == 2
    said = capsys.readouterr().err
    assert said.count("not installed here: uvicorn") == 1 and f"pip install '.[{extra}]' in a clone" in said
    assert "Traceback" not in said and "exited while starting" not in said


@pytest.mark.parametrize(("module", "code"), [("numpy", 2), ("no_such_module", None)])
def test_a_module_that_a_command_cannot_import_is_one_line_if_an_extra_brings_it(
    module: str, code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(app, "_parser", lambda: SimpleNamespace(make_context=fails))
    if code is None:
        with pytest.raises(ModuleNotFoundError):
            app.invoke(["status"])
        return
    assert run("status") == code
    assert capsys.readouterr().err.startswith("error: not installed here: numpy\n hint: pip install '.[server]' ")
