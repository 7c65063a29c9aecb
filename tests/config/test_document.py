"""From a path to a document: files that cannot be read, text that is not UTF-8, text that is not TOML."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg.config import load
from disagg.config.document import MAX_BYTES, parse
from disagg.errors import ConfigError

Expect = Callable[[dict[str, str], str, str], ConfigError]

QUOTES = 'a name with characters other than letters, digits, "-" and "_" needs quotes'


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return caught.value


def test_a_missing_file_is_one_line_and_names_init(tmp_path: Path) -> None:
    error = refusal(tmp_path / "hosts.toml")
    assert error.message == f"{tmp_path}/hosts.toml: no such file"
    assert "disagg init" in error.hint


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).message == f"{tmp_path}: is a folder"


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refusal(tmp_path / "pipe").message.endswith("pipe: not a regular file")


@pytest.mark.parametrize(("name", "reason"), [("x" * 300, "File name too long"), ("a\0b", "no such file")])
def test_a_path_that_cannot_be_opened_is_refused_in_one_line(tmp_path: Path, name: str, reason: str) -> None:
    message = refusal(tmp_path / name).message
    assert message.endswith(reason)
    assert "\n" not in message


def test_a_file_over_the_limit_is_refused_and_one_at_the_limit_is_read(tmp_path: Path, fleet_text: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(fleet_text + "#" * (MAX_BYTES - len(fleet_text)), encoding="utf-8")
    assert load(path).name == "lab"
    with path.open("a") as file:
        file.write("#")
    assert refusal(path).message == f"{path}: larger than 1048576 bytes"


def test_a_byte_that_is_not_utf8_is_pointed_at(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_bytes(b'[fleet]\nname = "\xff"\n')
    error = refusal(path)
    assert error.message == f"{path}:2:9: not UTF-8 (byte 0xff)"
    assert error.hint == "save the file as UTF-8"


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path, fleet_text: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_bytes(b"\xef\xbb\xbf" + fleet_text.replace("\n", "\r\n").encode())
    assert load(path).name == "lab"


def test_windows_line_ends_do_not_move_the_caret(tmp_path: Path, fleet_text: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_bytes(fleet_text.replace("\n", "\r\n").replace("port = 8000", "port = 0").encode())
    first, source, carets = refusal(path).message.split("\n")
    assert first == f"{path}:18:8: port is out of range"
    assert (source, carets) == ("  18 | port = 0", "     |        ^")


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("port = 8000", "port = «e»ight", "Invalid value", 'text needs quotes, as in address = "10.0.0.1"'),
        (
            "port = 8000",
            "port «8»000",
            "Expected '=' after a key in a key/value pair",
            f"a line reads key = value; {QUOTES}",
        ),
        (
            '[models."qwen:30b"]',
            "[models.qwen«:»30b]",
            "Expected ']' at the end of a table declaration",
            f'a ] is missing, or quotes: {QUOTES}, as in [models."qwen3-coder:30b"]',
        ),
        (
            "port = 8000",
            "port = 8000 «p»ort = 1",
            "Expected newline or end of document after a statement",
            "one key = value on a line; text needs quotes",
        ),
        (
            "[hosts.mac]",
            "[hosts.spark«]»",
            "Cannot declare ('hosts', 'spark') twice",
            "this table is opened twice: keep one",
        ),
        (
            "port = 8000",
            "port = 8000 \nport = 8001« »# again",
            "Cannot overwrite a value",
            "this key is given twice: keep one",
        ),
        (
            'name = "lab"',
            'name = "\\l«a»b"',
            "Unescaped '\\' in a string",
            "write \\\\ for a backslash, or use 'single quotes'",
        ),
    ],
)
def test_a_syntax_error_is_pointed_at(expect_fault: Expect, old: str, new: str, message: str, hint: str) -> None:
    expect_fault({old: new}, f"not valid TOML: {message}", hint)


def test_a_string_without_its_closing_quote_is_shown_at_the_end_of_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse('a = "b\nc = 1\n', "f")
    assert caught.value.message == ("f:1:7: not valid TOML: Illegal character '\\n'\n  1 | a = \"b\n    |       ^")
    assert caught.value.hint == "a closing quote is missing"


def test_an_error_at_the_end_of_the_text_is_shown_on_the_last_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("a = [1,\n", "f")
    assert caught.value.message == "f:2:1: not valid TOML: Invalid value\n  2 | \n    | ^"


@pytest.mark.parametrize(
    "text", ["a = " + "1" * 5000, "a = " + "[" * 5000, "a = " + "{b=" * 5000, "a" + ".a" * 2000 + "=1"]
)
def test_text_that_overstrains_the_parser_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f")
    assert caught.value.message.startswith("f")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('roles = ["prefill"', "a closing ] is missing"),
        ("[[hosts.a]\n", "a table of this file begins with one [, as in [hosts.dgx-spark-1]"),
    ],
)
def test_a_bracket_that_is_missing_has_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "hosts.toml")
    assert caught.value.hint == hint
