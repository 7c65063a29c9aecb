"""How a conversation looks: blocks of Markdown, figures, notes."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest
from rich.console import Console

from disagg.cli.views.chat import AnswerMarkdown, ChatView, context_note, figures_line, whole_blocks
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
