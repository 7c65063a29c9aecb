"""The text of error messages about a file: source line and caret, nearest words, user text made safe to print."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Collection, Sequence

import tomli_w

from disagg.errors import ConfigError

MAX_COLUMNS = 110  # of the source line; longer ones are cut around the caret


def fault(name: str, text: str, span: tuple[int, int], message: str, hint: str = "") -> ConfigError:
    """A ConfigError about text[start:end] of the file `name`: `name:line:column: message`, the source line, a caret.

    Lines and columns count from 1, in characters.
    """
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


def nearest(word: str, known: Collection[str]) -> str:
    """`did you mean "this"?` with the most similar known word, or "" if none is similar."""
    spellings = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word[:200].lower(), spellings, n=1)
    return f'did you mean "{spellings[close[0]]}"?' if close else ""


def one_of(allowed: Sequence[str]) -> str:
    """`one of "a", "b"`, for a hint."""
    return "one of " + ", ".join(f'"{word}"' for word in allowed)


def on_one_line(text: str) -> str:
    """Text from the user for a message: line breaks and control characters replaced, at most 80 characters."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return clean if len(clean) <= 80 else f"{clean[:79]}…"


def toml_key(key: str) -> str:
    """A key as TOML writes it: quoted if it must be."""
    return tomli_w.dumps({key: 0}).removesuffix(" = 0\n")


def _cut(line: str, column: int, length: int) -> tuple[str, int, int]:
    """The part of the line to show, the column of the fault in it, and how many characters of the fault it holds."""
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
