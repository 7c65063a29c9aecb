"""How a conversation looks: blocks of Markdown, figures, notes."""

from __future__ import annotations

import dataclasses
import io
import sys
import threading

import pytest
from rich.console import Console

from disagg.cli.chat.answer import AnswerMarkdown, ShownMarkdown, end_of_block, pause_after, whole_blocks
from disagg.cli.chat.conversation import Conversation, Turn
from disagg.cli.chat.view import ChatView, context_note, figures_line
from disagg.errors import RequestError
from disagg.inference.types import Chunk
from tests.cli.answers import completion, metrics


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("one line", ""),
        ("one\ntwo\n", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("# Title\nfirst", "# Title\n"),
        ("Title\n====\n", ""),
        ("```python\na = 1\n\nb = 2\n", ""),
        ("```\na\n```\nafter", "```\na\n```\n"),
        ("1. one\n\n   more\n\n2. two\n", ""),
        ("- one\n- two\n\nafter", "- one\n- two\n\n"),
        ("| a | b |\n| - | - |\n| 1 | 2 |\n", ""),
        ("a\n\nb\n\nc", "a\n\nb\n\n"),
        ("", ""),
    ],
)
def test_a_block_is_whole_when_the_next_one_has_begun(text: str, whole: str) -> None:
    assert text[: whole_blocks(text)] == whole


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("short", "short"),
        ("one\ntwo\nthree\nfour\n", "two\nthree\nfour\n"),
        ("word " * 100, ("word " * 100)[-30:]),
        ("```python\na\nb\nc\nd\n", "```python\nb\nc\nd\n"),
        ("```\na\nb\nc\n", "```\na\nb\nc\n"),
        ("| a |\n| - |\n| 1 |\n| 2 |\n| 3 |\n| 4 |\n", "| a |\n| - |\n| 2 |\n| 3 |\n| 4 |\n"),
        ("1. a\n2. b\n3. c\n4. d\n", "2. b\n3. c\n4. d\n"),
        ("- a\n  - b\n    - c\n    - d\n    - e\n", "- c\n- d\n- e\n"),
        ("- a\n  ```\n  b\n  c\n  d\n  e\n", "```\nc\nd\ne\n"),
        ("    a\n    b\n    c\n    d\n", "    b\n    c\n    d\n"),
    ],
)
def test_what_is_drawn_of_a_long_block_is_its_end_and_its_head(text: str, end: str) -> None:
    assert end_of_block(text, lines=3, columns=10) == end


@pytest.mark.parametrize(("work", "pause"), [(0.0, 1 / 12), (0.01, 1 / 12), (0.1, 0.3), (2.0, 6.0)])
def test_the_longer_a_frame_takes_the_longer_the_pause_after_it(work: float, pause: float) -> None:
    assert pause_after(work) == pytest.approx(pause)


class _Written(io.StringIO):
    """A terminal that notes which threads write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def write(self, text: str, /) -> int:
        self.threads.add(threading.get_ident())
        return super().write(text)


def test_the_event_loop_neither_parses_nor_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: set[int] = set()

    class Noted(AnswerMarkdown):
        def __init__(self, text: str) -> None:
            parsed.add(threading.get_ident())
            super().__init__(text)

    monkeypatch.setattr("disagg.cli.chat.answer.AnswerMarkdown", Noted)
    answer = ShownMarkdown(Console(file=(terminal := _Written()), force_terminal=True))
    terminal.threads.clear()
    for piece in ("one\n\n", "two\n", "- three\n"):
        answer.add(Chunk(piece, (), reasoning="", note="a note"))
    answer.end()
    assert "three" in terminal.getvalue() and "a note" in terminal.getvalue()
    assert parsed and threading.get_ident() not in parsed | terminal.threads


def test_pieces_are_taken_while_a_frame_is_being_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, go_on = threading.Event(), threading.Event()

    def stuck(text: str, lines: int, columns: int) -> str:
        draws.set()
        assert go_on.wait(60)
        return text

    monkeypatch.setattr("disagg.cli.chat.answer.end_of_block", stuck)
    answer = ShownMarkdown(Console(file=(file := io.StringIO()), width=80))
    answer.add(Chunk("first ", ()))
    assert draws.wait(60)
    for _ in range(100):
        answer.add(Chunk("more\n", ()))
    go_on.set()
    answer.end()
    assert file.getvalue().count("more") == 100


def test_a_terminal_that_cannot_be_written_fails_the_answer() -> None:
    class Gone(io.StringIO):
        def write(self, text: str, /) -> int:
            if text:
                raise OSError("gone")
            return 0

    answer = ShownMarkdown(Console(file=Gone(), width=80))
    answer.add(Chunk("first\n\nsecond", ()))
    with pytest.raises(OSError, match="gone"):
        answer.end()


@pytest.mark.parametrize("text", ["def __init__(self):", "self._create_for(_x_)", "__all__ and _rest_"])
def test_underscores_in_code_without_fences_are_text(text: str) -> None:
    assert shown(text) == text


def test_stars_emphasize() -> None:
    assert shown("**bold** and *slanted*") == "bold and slanted"


def shown(*pieces: str, width: int = 80, plain: bool = False, reasoning: str = "") -> str:
    """The end of what the terminal has after an answer of these pieces."""
    console = Console(file=(file := io.StringIO()), width=width, force_terminal=False, color_system=None)
    with ChatView(console, console, plain=plain).answering() as answer:
        if reasoning:
            answer.add(Chunk("", (), reasoning=reasoning))
        for piece in pieces:
            answer.add(Chunk(piece, ()))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


@pytest.mark.parametrize("width", [80, 120])
def test_markdown_is_shown_the_same_however_it_arrives(width: int) -> None:
    text = "# Title\n\nSome *text*\nin two lines, with `code`.\n\n```python\nx = 1\n\ny = 2\n```\n\n1. one\n2. two\n"
    at_once, by_letter = shown(text, width=width), shown(*text, width=width)
    assert at_once == by_letter
    assert "Some text\nin two lines, with code." in at_once
    assert "y = 2" in at_once and "```" not in at_once
    assert " 1 one\n 2 two" in at_once


@pytest.mark.parametrize("by_letter", [False, True])
def test_code_without_fences_keeps_its_lines_and_its_indentation(by_letter: bool) -> None:
    text = "def f(x):\n    if x:\n        return 1\n\n    return 2\n\nThat is all."
    lines = [line for line in shown(*(text if by_letter else [text])).splitlines() if line]
    assert lines[:3] == ["def f(x):", "    if x:", "        return 1"]
    assert lines[3].endswith("    return 2") and lines[4] == "That is all."


def test_tags_and_control_characters_are_text() -> None:
    text = shown("a List<int> and <b>bold</b> \x1b[31mred\n\n<div>\nblock\n")
    assert "List<int>" in text and "<b>bold</b>" in text and "<div>" in text
    assert "\x1b[31m" not in text


def test_reasoning_precedes_the_answer() -> None:
    assert shown("Six.", reasoning="2 * 3") == "2 * 3\n\nSix."
    assert shown(reasoning="2 * 3") == "2 * 3"


def test_a_plain_answer_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    shown("def f():\n    # *x*", plain=True)
    assert capsys.readouterr().out == "def f():\n    # *x*\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_reach_files_and_no_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    shown("a\r\n\x1b[31mb\n", plain=True)
    assert capsys.readouterr().out == ("a\ufffd\n\ufffd[31mb\n" if terminal else "a\r\n\x1b[31mb\n")


def test_links_show_where_they_lead() -> None:
    console = Console(file=(file := io.StringIO()), width=80)
    console.print(AnswerMarkdown("[here](https://example.org)"))
    assert "here (https://example.org)" in file.getvalue()


def test_a_warning_that_was_noted_while_the_answer_arrived_is_not_printed_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(file=(file := io.StringIO()), width=80)
    view = ChatView(console, console, plain=True)
    with view.answering() as answer:
        answer.add(Chunk("", (), note="mac-1 failed"))
        answer.add(Chunk("text", ()))
    view.figures(dataclasses.replace(completion("m"), warnings=("mac-1 failed", "slow")), 1000)
    assert file.getvalue().count("mac-1 failed") == 1 and "warning: slow" in file.getvalue()


def test_the_figures_of_an_answer_are_one_line_that_says_what_was_held() -> None:
    figures = metrics("m", prompt_tokens=3120, held_tokens=3050, ttft=0.21)
    assert figures_line(figures) == "3,120 prompt tokens, 3,050 held; TTFT 210 ms; 128 tokens at 295 tok/s"
    alone = metrics("m", prompt_tokens=1, completion_tokens=1, decode_speed=None, ttft=0.21)
    assert figures_line(alone) == "1 prompt token; TTFT 210 ms; 1 token"


def test_a_context_that_is_full_or_nearly_so_is_noted_with_what_to_do() -> None:
    answer = completion("m", total_tokens=100)
    assert "/clear" in context_note(answer, 100)
    note = context_note(answer, 1000)
    assert note == 'The answer reached its token limit: write "go on", or set a higher --max-tokens.'


def test_after_the_answer_to_a_pipe_nothing_is_suggested_that_needs_another_turn() -> None:
    answer = completion("m", total_tokens=100)
    assert context_note(answer, 1000, piped=True) == "The answer reached its token limit: set a higher --max-tokens."
    assert context_note(answer, 100, piped=True) == "The context of 100 tokens is full: the answer is cut."
    whole = dataclasses.replace(answer, finish_reason="stop")
    assert context_note(whole, 100, piped=True) == context_note(whole, 110, piped=True) == ""


def test_an_error_is_one_line_with_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=(file := io.StringIO()), width=80)
    ChatView(console, console, plain=True).failed(RequestError("too long"), "/clear")
    assert file.getvalue() == "error: too long (/clear)\n"


def test_the_figures_of_an_answer_that_was_stopped_are_not_those_of_the_one_before_it() -> None:
    console = Console(file=(file := io.StringIO()), width=80)
    view = ChatView(console, console, plain=True)
    view.stats(None, Conversation("m", turns=(Turn("a", "b"), Turn("c", "d", cut=True))))
    assert file.getvalue() == "2 turns; the last answer is not complete, and has no figures\n"
