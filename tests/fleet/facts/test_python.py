from __future__ import annotations

import pytest

from disagg.api.base import Contract
from disagg.errors import FleetError
from disagg.fleet.facts.python import json_or_none, last_json
from disagg.fleet.machine.local import LocalMachine
from disagg.fleet.machine.machine import CommandResult


class Count(Contract, frozen=True):
    bytes: int


def read(stdout: str) -> Count:
    return last_json(CommandResult(0, stdout, ""), LocalMachine("h"), Count)


def test_the_last_line_of_the_output_is_read() -> None:
    assert read('Welcome\n{"bytes": 1}\n{"bytes": 2, "peer": "a later version prints more"}\n\n') == Count(2)


@pytest.mark.parametrize("stdout", ["", "Killed\n", '{"bytes": 1}\nKilled\n', '{"bytes": '])
def test_output_without_json_at_its_end_is_an_error_with_the_machine(stdout: str) -> None:
    with pytest.raises(FleetError, match="h: a program printed no JSON") as caught:
        read(stdout)
    assert "disagg ssh h" in caught.value.hint


@pytest.mark.parametrize("stdout", ["[]", "{}", '{"bytes": "2"}', '{"bytes": null}', "null"])
def test_json_of_another_form_is_an_error_with_the_machine(stdout: str) -> None:
    with pytest.raises(FleetError, match="h: a program printed malformed JSON: "):
        read(stdout)


def test_optional_output_that_does_not_fit_is_none() -> None:
    assert json_or_none('{"bytes": 2}', Count) == Count(2)
    assert [json_or_none(line, Count) for line in ("", "10%", "[]", '{"done": 1}')] == [None] * 4


def test_numbers_that_only_python_prints_are_read() -> None:
    assert json_or_none('{"limit": Infinity}', dict[str, float]) == {"limit": float("inf")}
