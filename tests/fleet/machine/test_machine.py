"""The scripts that a machine's shell runs, by themselves, and what is kept of a command's output."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from disagg.fleet.machine.machine import BOOTSTRAP, OutputStream, last_lines, program, script
from disagg.fleet.machine.upload import packed
from tests.deadlines import wait_until

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


SLEEP_S = 4321.5
"""Of no other sleep on this machine."""
ENDED_AFTER_FIRST_MV = 'mv() { command mv "$@" || return 1; if [ "$1" = -f ]; then kill -s TERM $$; fi; }\n'


def test_a_folder_that_was_to_be_replaced_is_there_again_where_that_is_broken_off(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/old").touch()
    with packed({"new": b"1"}) as archive:
        argv = [
            "sh",
            "-c",
            ENDED_AFTER_FIRST_MV + script("path.sh", "beside.sh", "put_tree.sh"),
            "sh",
            str(tmp_path / "tree"),
        ]
        done = subprocess.run(argv, input=archive.stream.read(), capture_output=True, timeout=20, check=False)
    assert done.returncode == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]
    assert [path.name for path in (tmp_path / "tree").iterdir()] == ["old"]


@pytest.mark.parametrize("sh", ["sh", "bash"])
def test_a_guard_leaves_no_sleep_behind_however_soon_its_client_goes(sh: str) -> None:
    """Each message replaces the sleep that the one before has begun, and the end comes while the last one begins."""
    guarding = program([f"{SLEEP_S}"], script("guard.sh"), takes_input=True)
    argv = [sh, "-c", BOOTSTRAP.replace("/bin/sh", sh)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    for number in range(25):
        with subprocess.Popen(argv, stdin=pipe, stdout=null, stderr=null, start_new_session=True) as guard:
            guard.communicate(guarding + b"live\n" * (number % 5), timeout=20)
    try:  # the last guard has ended; what it has begun may be ending
        wait_until(lambda: not sleeping(), 10, "the last sleep to end")
    finally:
        for one in sleeping():
            one.kill()


def sleeping() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if f"{SLEEP_S}" in (one.info["cmdline"] or ())]
