"""A fault in a text file, shown: `file:line:column: message`, the source line, a caret under the exact place."""

from __future__ import annotations

import unicodedata

from disagg.errors import ConfigError

MAX_COLUMNS = 110  # of a source line shown; longer ones are cut around the caret


def fault(name: str, text: str, span: tuple[int, int], message: str, hint: str = "") -> ConfigError:
    """The ConfigError for text[start:end] of the file called `name`. Lines and columns count from 1, in characters."""
    start, end = span
    first = text.rfind("\n", 0, start) + 1
    last = text.find("\n", first)
    line = text[first:] if last < 0 else text[first:last]
    number, column = text.count("\n", 0, start) + 1, start - first
    shown, column_shown, length = _cut(line, column, max(1, min(end - start, len(line) - column)))
    pad = " " * _width(shown[:column_shown])
    carets = "^" * max(1, _width(shown[column_shown : column_shown + length]))
    gutter = " " * len(str(number))
    return ConfigError(
        f"{name}:{number}:{column + 1}: {message}\n  {number} | {shown}\n  {gutter} | {pad}{carets}",
        hint,
    )


def _cut(line: str, column: int, length: int) -> tuple[str, int, int]:
    """What is shown of a line, where the fault begins in that, and how much of the fault is in it."""
    line = "".join(map(_visible, line))
    if len(line) <= MAX_COLUMNS:
        return line, column, length
    begin = max(0, min(column - MAX_COLUMNS // 3, len(line) - MAX_COLUMNS))
    end = begin + MAX_COLUMNS
    head, tail = ("…" if begin else ""), ("…" if end < len(line) else "")
    return f"{head}{line[begin:end]}{tail}", column - begin + len(head), min(length, end - column)


def _visible(character: str) -> str:
    """Tabs as one space, so that the caret fits; other control characters must not reach a terminal."""
    if character == "\t":
        return " "
    return character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"


def _width(text: str) -> int:
    """Terminal columns."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )
