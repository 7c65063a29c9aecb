"""The position of each key and value of a TOML text, which tomli does not report.

The text has already been accepted by tomli, so this scanner does not validate it. If the scan ends early, the keys
behind that point have no position, and an error in them points at the nearest table that has one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tomli

KeyPath = tuple[str | int, ...]  # table and key names from the root; list elements by index
Span = tuple[int, int]  # text[start:end]

_BASIC, _LITERAL = r'"(?:\\.|[^"\\\n])*"', r"'[^'\n]*'"
_MULTI_BASIC, _MULTI_LITERAL = r'"""(?:\\.|[^\\])*?"{3,5}', r"'''.*?'{3,5}"
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY_PART = re.compile(rf"[ \t]*(?P<part>[A-Za-z0-9_-]+|{_BASIC}|{_LITERAL})[ \t]*\.?")
_STRING = re.compile(rf"{_MULTI_BASIC}|{_MULTI_LITERAL}|{_BASIC}|{_LITERAL}", re.DOTALL)
_SCALAR = re.compile(r"[^,\]}\n#]+")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")


@dataclass(frozen=True, slots=True)
class KeySpans:
    """The spans of a key and of its value. The value of a `[table]` is its header; a list element is its own key."""

    key: Span
    value: Span


def locate(text: str) -> dict[KeyPath, KeySpans]:
    """The spans of every key, table and list element of a valid TOML text with ``\\n`` line ends."""
    scan = _Scan(text)
    # A value nested hundreds deep, or TOML that the scan does not support: the spans so far are still useful.
    with contextlib.suppress(RecursionError, LookupError):
        scan.document()
    return scan.spans


class _Scan:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.spans: dict[KeyPath, KeySpans] = {}
        self._elements: dict[KeyPath, int] = {}  # [[tables]] so far

    def document(self) -> None:
        table: KeyPath = ()
        while True:
            self._skip(_BLANK)
            if self.at >= len(self.text):
                return
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> KeyPath:
        start, double = self.at, self.text.startswith("[[", self.at)
        self.at += 1 + double
        parts = list(self._key())
        self.at += 1 + double
        path = self._enter((), parts[:-1])
        path, header = (*path, parts[-1][0]), (start, self.at)
        if double:
            self.spans.setdefault(path, KeySpans(parts[-1][1], header))
            self._elements[path] = self._elements.get(path, -1) + 1
            path = (*path, self._elements[path])
        self.spans[path] = KeySpans(parts[-1][1], header)
        return path

    def _pair(self, table: KeyPath) -> None:
        parts = list(self._key())
        parent = self._enter(table, parts[:-1])
        self._skip(_EQUALS)
        path = (*parent, parts[-1][0])
        start = self.at
        self.spans[path] = KeySpans(parts[-1][1], (start, self._value(path)))

    def _value(self, path: KeyPath) -> int:
        """Skip one value and return its end."""
        opening = self.text[self.at]
        if opening == "[":
            self._sequence(path, "]")
        elif opening == "{":
            self._sequence(path, "}")
        elif opening in "\"'":
            self._skip(_STRING)
        else:
            scalar = _SCALAR.match(self.text, self.at)
            self.at += len(scalar.group().rstrip()) if scalar else 1
        return self.at

    def _sequence(self, path: KeyPath, closing: str) -> None:
        """Skip an array or an inline table."""
        self.at += 1
        index = 0
        while True:
            self._skip(_BLANK)
            if self.text[self.at] == ",":
                self.at += 1
            elif self.text[self.at] == closing:
                self.at += 1
                return
            elif closing == "}":
                self._pair(path)
            else:
                start, element = self.at, (*path, index)
                span = (start, self._value(element))
                self.spans[element] = KeySpans(span, span)
                index += 1

    def _key(self) -> Iterator[tuple[str, Span]]:
        """The parts of a dotted key, each with its span."""
        while True:
            match = _KEY_PART.match(self.text, self.at)
            if match is None:
                raise LookupError(f"no key at offset {self.at}")
            self.at = match.end()
            yield _name(match["part"]), match.span("part")
            if not match.group().endswith("."):
                return

    def _enter(self, table: KeyPath, parts: list[tuple[str, Span]]) -> KeyPath:
        """The table that the leading parts of a dotted key lead to. Parts that have no span yet get one."""
        for name, span in parts:
            table = (*table, name)
            if table not in self.spans:
                self.spans[table] = KeySpans(span, span)
            if table in self._elements:
                table = (*table, self._elements[table])
        return table

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at


def _name(part: str) -> str:
    """A key part without quotes and escapes."""
    if part[0] not in "\"'":
        return part
    parsed: dict[str, Any] = tomli.loads(f"{part} = 0")
    return next(iter(parsed))
