"""How a fault in a text file is shown."""

from __future__ import annotations

import pytest

from disagg.config.document import MAX_COLUMNS, fault


def shown(text: str, start: int, end: int) -> list[str]:
    return fault("f", text, (start, end), "wrong", "fix it").message.split("\n")


def test_the_message_the_line_and_the_carets() -> None:
    error = fault("dir/f.toml", "one\ntwo = 2\n", (4, 7), "wrong", "fix it")
    assert error.message == "dir/f.toml:2:1: wrong\n  2 | two = 2\n    | ^^^"
    assert error.hint == "fix it"
    assert str(error).endswith("^^^ (fix it)")


def test_a_span_over_several_lines_is_marked_to_the_end_of_its_first() -> None:
    assert shown("a = [\n 1,\n]", 4, 11)[1:] == ["  1 | a = [", "    |     ^"]


@pytest.mark.parametrize(("text", "at"), [("", 0), ("a\n", 2), ("a", 1)])
def test_the_end_of_the_text_gets_one_caret(text: str, at: int) -> None:
    assert shown(text, at, at)[2].strip(" |") == "^"


def test_carets_stand_right_behind_tabs_and_wide_characters() -> None:
    assert shown('\tk = "日本é" x', 10, 12)[1:] == ['  1 |  k = "日本é" x', "    | " + " " * 12 + "^^"]


def test_wide_characters_get_two_carets_and_combining_ones_none() -> None:
    assert shown("日e\u0301!", 0, 4)[2] == "    | ^^^^"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert shown("a\x1b[2J\x07b", 6, 7)[1:] == ["  1 | a\ufffd[2J\ufffdb", "    |       ^"]


@pytest.mark.parametrize("start", [0, 500, 4990])
def test_a_very_long_line_is_cut_around_the_fault(start: int) -> None:
    text = "x" * start + "FAULT" + "y" * (5000 - start)
    first, line, carets = shown(text, start, start + 5)
    assert first == f"f:1:{start + 1}: wrong"
    assert len(line) <= MAX_COLUMNS + 8
    assert line[carets.index("^") : carets.rindex("^") + 1] == "FAULT"
    assert line.endswith("…") == (start < 4000)


def test_a_fault_longer_than_the_window_is_cut_with_it() -> None:
    _, line, carets = shown("k = " + "v" * 5000, 4, 5004)
    assert carets.count("^") == line.count("v")
