"""Streams of output, cut anywhere."""

from __future__ import annotations

import subprocess

import pytest

from disagg.fleet.machine.machine import BOOTSTRAP, OutputStream, last_lines, program

SAID = b"Welcome\nback\n@disagg 4711\none\ntwo\r\nthree\rfour\n\nlast"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_come_out_the_same_however_the_bytes_are_cut(size: int) -> None:
    lines: list[str] = []
    stream = OutputStream(lines.append)
    for start in range(0, len(SAID), size):
        stream.feed(SAID[start : start + size])
    stream.end()
    assert stream.pid == 4711
    assert stream.text == "one\ntwo\r\nthree\rfour\n\nlast"
    assert lines == ["one", "two", "three", "four", "", "last"]


def test_a_greeting_without_a_line_end_does_not_hide_the_mark() -> None:
    login = f"printf Welcome; printf Careful >&2; {BOOTSTRAP}"
    done = subprocess.run(["sh", "-c", login], input=program(["echo", "one"]), capture_output=True, check=True)
    out, err = OutputStream(), OutputStream()
    out.feed(done.stdout)
    err.feed(done.stderr)
    assert out.pid is not None and (out.text, err.pid, err.text) == ("one\n", 0, "")


def test_a_character_cut_in_two_is_one_character() -> None:
    lines: list[str] = []
    stream = OutputStream(lines.append)
    for byte in "@disagg 1\nü\n".encode():
        stream.feed(bytes([byte]))
    assert (stream.text, lines) == ("ü\n", ["ü"])


def test_both_ends_are_kept() -> None:
    stream = OutputStream(keep=4)
    stream.feed(b"@disagg 1\n")
    for number in range(10):
        stream.feed(b"%d" % number)
    assert stream.content == b"0123\n[... 2 bytes left out ...]\n6789"


def test_a_line_without_end_is_reported_in_pieces() -> None:
    lines: list[str] = []
    stream = OutputStream(lines.append)
    stream.feed(b"@disagg 1\n" + b"x" * 200_000)
    assert len(lines) == 1 and len(lines[0]) == 200_000


def test_without_the_mark_there_is_only_a_greeting() -> None:
    stream = OutputStream()
    stream.feed(b"no such account\n")
    assert (stream.pid, stream.text, stream.greeting) == (None, "", "no such account")


def test_what_a_command_said_is_quoted_without_what_drives_a_terminal() -> None:
    said = "first\n\n\x1b]0;title\x07 \x1b[31mred\r\n  \nno tab\tlost\n"
    assert last_lines(said, 2) == "\ufffd]0;title\ufffd \ufffd[31mred\nno tab\tlost"
    assert last_lines(" \n", 3) == ""
