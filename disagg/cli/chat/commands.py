"""The commands of a conversation, as a table. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from disagg.errors import UsageError

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "help": ("", "Show this list."),
    "model": ("[NAME]", "Go on with another model; without a name, list them."),
    "system": ("[TEXT]", "Set the system message; - removes it; without a text, show it."),
    "stats": ("", "Show what the last answer cost, and where its time went."),
    "clear": ("", "Begin a new conversation."),
    "save": ("FILE", "Write the conversation to a file."),
    "load": ("FILE", "Go on with the conversation of a file."),
    "exit": ("", "Leave, as Ctrl-D does."),
}
"""Each command's argument and what it does."""

_COMMAND: Final = re.compile(r"/([A-Za-z]*)(?:\s+(.*))?", re.DOTALL)
QUOTES: Final = '"""'


class ChatCommand(NamedTuple):
    """A command that was typed."""

    name: str
    argument: str


def parse(text: str) -> ChatCommand | None:
    """The command that this text is; None if it is a message, such as a path. Raises UsageError for a command that does
    not exist, and for an argument that is missing or not taken."""
    found = _COMMAND.fullmatch(text.strip())
    if found is None:
        return None
    name, argument = found[1].lower(), (found[2] or "").strip()
    if name not in COMMANDS:
        raise UsageError(f"there is no command /{name}", "/help lists them")
    form = COMMANDS[name][0]
    if bool(argument) > bool(form) or (form.isalpha() and not argument):
        raise UsageError(f"/{name}{f' {form}' if form else ''}: {'it takes no argument' if argument else 'of which?'}")
    return ChatCommand(name, argument)


def message_of(text: str) -> str:
    """A message without the triple quotes around several lines."""
    stripped = text.strip()
    if is_open(stripped) or not stripped.startswith(QUOTES):
        return stripped.removeprefix(QUOTES)
    return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")


def is_open(text: str) -> bool:
    """Whether the triple quotes at the text's beginning still need their end, so that Enter begins a new line."""
    stripped = text.strip()
    return stripped.startswith(QUOTES) and not (len(stripped) >= 2 * len(QUOTES) and stripped.endswith(QUOTES))


def complete(text: str, models: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """What may follow this beginning of a line: the word, how much of it is typed, and what it means."""
    if text.startswith("/model "):
        typed = text.removeprefix("/model ")
        yield from ((name, typed, "") for name in models if name.startswith(typed))
    elif text.startswith("/") and " " not in text:
        yield from ((f"/{name}", text, meaning) for name, (_, meaning) in COMMANDS.items() if name.startswith(text[1:]))
