"""From a path to a parsed TOML document, which can build errors that point at a key or value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from disagg.config.toml.locate import KeyPath, KeySpans, locate
from disagg.config.toml.messages import fault
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
