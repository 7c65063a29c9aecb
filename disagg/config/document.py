"""From a path to a parsed TOML text, whose errors point at a key or value: a source line with a caret, the
nearest words, what users wrote made safe to print."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from disagg.config.locate import KeyPath, KeySpans, locate
from disagg.errors import ConfigError

MAX_BYTES = 1 << 20

_QUOTES = 'a name with characters other than letters, digits, "-" and "_" needs quotes'
_SYNTAX_HINTS = {  # how tomli's message begins -> how to fix it
    "Invalid value": 'text needs quotes, as in address = "10.0.0.1"',
    "Cannot overwrite a value": "this key is given twice: keep one",
    "Duplicate inline table key": "this key is given twice: keep one",
    "Cannot declare": "this table is opened twice: keep one",
    "Expected ']' at the end of a table": f'a ] is missing, or quotes: {_QUOTES}, as in [models."qwen3-coder:30b"]',
    "Expected '=' after a key": f"a line reads key = value; {_QUOTES}",
    "Unclosed array": "a closing ] is missing",
    "Expected ']]'": "a table of this file begins with one [, as in [hosts.dgx-spark-1]",
    "Expected newline": "one key = value on a line; text needs quotes",
    "Illegal character '\\n'": "a closing quote is missing",
    "Unterminated string": "a closing quote is missing",
    "Unescaped '\\' in a string": "write \\\\ for a backslash, or use 'single quotes'",
}
MAX_COLUMNS = 110  # of the source line; longer ones are cut around the caret


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed TOML file. `name`: of the file in messages."""

    name: str
    text: str
    data: Mapping[str, Any]

    def fault_at_key(self, path: KeyPath, message: str, hint: str = "") -> ConfigError:
        """A ConfigError that points at the key at `path`."""
        spans, exact = self._spans(path)
        return fault(self.name, self.text, spans.key if exact else spans.value, message, hint)

    def fault_at_value(self, path: KeyPath, message: str, hint: str = "") -> ConfigError:
        """A ConfigError that points at the value at `path`; for a table, at its header."""
        spans, _ = self._spans(path)
        return fault(self.name, self.text, spans.value, message, hint)

    def _spans(self, path: KeyPath) -> tuple[KeySpans, bool]:
        """The spans of `path` and True, or of the nearest table around it and False."""
        located = locate(self.text)  # here and not in `parse`: a valid file needs no spans
        for length in range(len(path), 0, -1):
            if spans := located.get(path[:length]):
                return spans, length == len(path)
        return KeySpans((0, 0), (0, 0)), False


def read(path: Path, missing_hint: str = "") -> str:
    """The text of a configuration file, line ends as ``\\n``. `missing_hint`: the hint if the file does not exist."""
    raw = _bytes(path, missing_hint)
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes", "is this the right file?")
    try:
        text = raw.decode("utf-8-sig")  # editors on Windows begin files with a byte order mark
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise ConfigError(
            f"{path}:{line}:{column}: not UTF-8 (byte 0x{raw[error.start]:02x})", "save the file as UTF-8"
        ) from error
    return text.replace("\r\n", "\n")


def parse(text: str, name: str) -> Document:
    """Parse a TOML text. `name`: of the file in messages."""
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        hint = next((hint for start, hint in _SYNTAX_HINTS.items() if error.msg.startswith(start)), "")
        raise fault(name, text, (error.pos, error.pos + 1), f"not valid TOML: {error.msg}", hint) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; hundreds of nested lists
        raise ConfigError(f"{name}: not usable TOML: {error}") from error
    return Document(name, text, data)


def _bytes(path: Path, missing_hint: str) -> bytes:
    """At most one byte more than the limit. Checks the kind of file first: opening a pipe would wait for a writer."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder", "name the file in it")
        if not path.exists():
            raise ConfigError(f"{path}: no such file", missing_hint)
        if not path.is_file():
            raise ConfigError(f"{path}: not a regular file")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


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
