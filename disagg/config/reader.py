"""From a path to a parsed TOML document whose keys can be pointed at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from disagg.config.excerpt import fault
from disagg.config.locate import KeyPath, Place, locate
from disagg.errors import ConfigError

MAX_BYTES = 1 << 20

_QUOTES = 'a name with other characters than letters, digits, "-" and "_" needs quotes'
_SYNTAX_HINTS = {  # how tomli's message begins -> how to fix it
    "Invalid value": 'text needs quotes, as in address = "10.0.0.1"',
    "Cannot overwrite a value": "this key is given twice: keep one",
    "Duplicate inline table key": "this key is given twice: keep one",
    "Cannot declare": "this table is opened twice: keep one",
    "Expected ']' at the end of a table": f'{_QUOTES}, as in [models."qwen3-coder:30b"]',
    "Expected '=' after a key": f"a line reads key = value; {_QUOTES}",
    "Expected newline": "one key = value on a line; text needs quotes",
    "Illegal character '\\n'": "a closing quote is missing",
    "Unterminated string": "a closing quote is missing",
    "Unescaped '\\' in a string": "write \\\\ for a backslash, or use 'single quotes'",
}


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed TOML file. `name` is what messages call it."""

    name: str
    text: str
    data: Mapping[str, Any]

    def fault_at_key(self, path: KeyPath, message: str, hint: str = "") -> ConfigError:
        """A fault in the key at `path`."""
        place, found = self._place(path)
        return fault(self.name, self.text, place.key if found else place.value, message, hint)

    def fault_at_value(self, path: KeyPath, message: str, hint: str = "") -> ConfigError:
        """A fault in the value at `path`; for a table, in its header."""
        place, _ = self._place(path)
        return fault(self.name, self.text, place.value, message, hint)

    def _place(self, path: KeyPath) -> tuple[Place, bool]:
        """Where `path` stands, or else the nearest table around it."""
        places = locate(self.text)  # only now: a file without faults needs none
        for length in range(len(path), 0, -1):
            if place := places.get(path[:length]):
                return place, length == len(path)
        return Place((0, 0), (0, 0)), False


def read(path: Path, where_from: str = "") -> str:
    """The text of a configuration file, line ends as ``\\n``. `where_from`: the hint where there is no such file."""
    raw = _bytes(path, where_from)
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
    """The document in a TOML text."""
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        hint = next((hint for start, hint in _SYNTAX_HINTS.items() if error.msg.startswith(start)), "")
        raise fault(name, text, (error.pos, error.pos + 1), f"not valid TOML: {error.msg}", hint) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; hundreds of nested lists
        raise ConfigError(f"{name}: not usable TOML: {error}") from error
    return Document(name, text, data)


def _bytes(path: Path, where_from: str) -> bytes:
    """At most one byte more than the limit. Looks before it opens: opening a pipe would wait for a writer."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder", "name the file in it")
        if not path.exists():
            raise ConfigError(f"{path}: no such file", where_from)
        if not path.is_file():
            raise ConfigError(f"{path}: not a regular file")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
