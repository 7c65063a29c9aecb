"""Which text is a command, which a message, and what a line may go on with."""

from __future__ import annotations

import pytest

from disagg.cli.chat.commands import COMMANDS, ChatCommand, complete, is_open, message_of, parse
from disagg.errors import UsageError


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/help", ChatCommand("help", "")),
        ("  /HELP  ", ChatCommand("help", "")),
        ("/model qwen", ChatCommand("model", "qwen")),
        ("/model", ChatCommand("model", "")),
        ("/system Be brief,\nand polite.", ChatCommand("system", "Be brief,\nand polite.")),
        ("/save a file.json", ChatCommand("save", "a file.json")),
        ("/etc/hosts has what?", None),
        ("a /help", None),
        ("2 / 3", None),
        ("", None),
    ],
)
def test_a_line_is_a_command_or_a_message(text: str, command: ChatCommand | None) -> None:
    assert parse(text) == command


@pytest.mark.parametrize(
    ("text", "message"), [("/nosuch", "no command"), ("/", "no command"), ("/save", "FILE"), ("/clear all", "no arg")]
)
def test_a_command_that_does_not_exist_or_lacks_its_argument_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("typed", "is_begun", "message"),
    [
        ("hello", False, "hello"),
        ('"""', True, ""),
        ('"""one', True, "one"),
        ('"""\none\ntwo\n"""', False, "one\ntwo"),
        ('"""  one\n  two"""', False, "  one\n  two"),
        ('""""""', False, ""),
        ('""""', True, '"'),
        ('say """x"""', False, 'say """x"""'),
        ("  \n ", False, ""),
    ],
)
def test_triple_quotes_hold_several_lines(typed: str, is_begun: bool, message: str) -> None:
    assert (is_open(typed), message_of(typed)) == (is_begun, message)


def test_commands_and_models_are_completed() -> None:
    models = ("qwen", "qwen3-demo", "gpt-oss")
    assert [word for word, _, _ in complete("/s", models)] == ["/system", "/stats", "/save"]
    assert len(list(complete("/", models))) == len(COMMANDS)
    assert list(complete("/model q", models)) == [("qwen", "q", ""), ("qwen3-demo", "q", "")]
    assert not list(complete("hello", models)) and not list(complete("/save x", models))
