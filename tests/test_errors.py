"""The tree of errors: it is complete, drawn from the code, and survives HTTP."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import disagg
from disagg import errors
from disagg.errors import CommandFailed, ConfigError, DisaggError, FleetError, StartFailed, exit_code_of_all

PACKAGE = Path(disagg.__file__).parent
KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, DisaggError)]
SIGNALS = {  # caught by the module's only caller; none of them reaches a user
    "api/base.py": "InvalidValue",
    "fleet/lifecycle/status/http_get.py": "ReplyTimeout",
    "fleet/models/fetch_program.py": "Failed",
    "fleet/models/serve_program.py": "Failed",
    "http/arrival.py": "Refused",
    "inference/attempts/caller.py": "PrefillFailed",
}


def test_every_exception_is_defined_in_errors() -> None:
    names = {kind.__name__ for kind in KINDS}
    may_be_one = re.compile(rf"^ *class .*(Error|Exception|{'|'.join(names)})", re.MULTILINE)
    elsewhere = [
        f"{path.relative_to(PACKAGE).as_posix()}: {node.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "errors.py" and may_be_one.search(path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and _is_exception(node, names) and not node.name.startswith("_")
    ]
    assert elsewhere == [f"{path}: {name}" for path, name in sorted(SIGNALS.items())]


def test_the_tree_in_the_docstring_is_the_tree_of_the_code() -> None:
    drawn = [line for line in (errors.__doc__ or "").splitlines() if "  exit " in line]
    assert [line[: line.index("exit ")].rstrip() for line in drawn] == _tree(DisaggError)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_docstring_states_the_exit_code_and_http_status(kind: type[DisaggError]) -> None:
    row = next(line for line in (errors.__doc__ or "").splitlines() if f" {kind.__name__} " in line)
    assert f"exit {kind.exit_code}" in row
    if "HTTP" in row:
        assert f"HTTP {kind.http_status}" in row
    else:
        assert kind.http_status == kind.__base__.http_status  # type: ignore[union-attr]  # every kind has a base


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_keeps_its_kind_message_and_hint_across_json(kind: type[DisaggError]) -> None:
    again = DisaggError.from_json(kind("spark: it failed", "try this").to_json())
    assert (type(again), again.message, again.hint) == (kind, "spark: it failed", "try this")


def test_details_that_are_not_in_the_json_have_defaults() -> None:
    failed = DisaggError.from_json(CommandFailed("x", exit_status=3, stdout="out").to_json())
    assert isinstance(failed, CommandFailed) and (failed.exit_status, failed.stdout) == (None, "")
    started = DisaggError.from_json(StartFailed("x", log=["line"]).to_json())
    assert isinstance(started, StartFailed) and started.log == ()


def test_an_unknown_code_becomes_a_plain_error() -> None:
    error = DisaggError.from_json({"code": "FromALaterVersion", "message": "no"})
    assert type(error) is DisaggError and error.message == "no"


@pytest.mark.parametrize(("codes", "code"), [((), 0), ((0, 0), 0), ((0, 1), 1), ((3, 0), 1), ((1, 4), 4)])
def test_a_command_on_several_hosts_ends_with_one_code(codes: tuple[int, ...], code: int) -> None:
    assert exit_code_of_all(codes) == code


def test_the_text_of_an_error_is_its_message_and_its_hint() -> None:
    assert str(ConfigError("no such file", "disagg init")) == "no such file (disagg init)"
    assert FleetError("no").exit_code == 1


def _is_exception(node: ast.ClassDef, names: set[str]) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return any(base in names or base.endswith(("Error", "Exception")) for base in bases)


def _tree(kind: type[DisaggError], indent: str = "    ", branch: str = "") -> list[str]:
    """The lines of the drawing: 4 spaces, then branches."""
    lines = [f"{indent}{branch}{kind.__name__}"]
    children = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    below = indent + {"": "", "├── ": "│   ", "└── ": "    "}[branch]
    for child in children:
        lines += _tree(child, below, "└── " if child is children[-1] else "├── ")
    return lines


def test_the_first_line_of_an_exception_is_its_repr_if_it_has_no_text() -> None:
    assert errors.first_line(ValueError("\n too large\nsee the log")) == "too large"
    assert errors.first_line(MemoryError()) == "MemoryError()"
