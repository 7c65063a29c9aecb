"""The prompts of comparisons."""

from __future__ import annotations

import sys

import pytest

from disagg.errors import CapabilityMissing
from disagg.verify import hosts
from disagg.verify.hosts import SAMPLE_MODULES, pieces, sample_text


def test_source_is_read_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tkinter", None)  # as on a Debian without python3-tk
    monkeypatch.delitem(sys.modules, "turtle", raising=False)
    assert "class RawTurtle" in sample_text()
    assert "turtle" not in sys.modules


def test_all_modules_are_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sample_text()
    assert len(whole) > 700_000
    for name in SAMPLE_MODULES:
        monkeypatch.setattr(hosts, "SAMPLE_MODULES", (name,))
        assert sample_text() in whole


def test_a_module_that_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SAMPLE_MODULES", ("no_such_module", "argparse"))
    assert "class ArgumentParser" in sample_text()


def test_a_python_without_source_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SAMPLE_MODULES", ("no_such_module", "sys"))
    with pytest.raises(CapabilityMissing, match="no source files"):
        sample_text()


def test_pieces_are_taken_from_the_whole_text() -> None:
    assert pieces("abcdef", 3, 2) == ["ab", "bc", "cd"]
    assert pieces("ab", 2, 4) == ["abab", "baba"]
