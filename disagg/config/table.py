"""One TOML table, read key by key into checked values. Every error points at its key or value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from typing import Any, TypeVar

from disagg.config.document import Document, nearest, on_one_line, one_of, toml_key
from disagg.config.locate import KeyPath
from disagg.errors import ConfigError

T = TypeVar("T")
L = TypeVar("L", bound=str)

# All types that TOML has.
_KINDS: dict[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    float: "a fraction",
    list: "a list",
    dict: "a table",
    datetime: "a date",
    date: "a date",
    time: "a time",
}


class Table:
    """The table at `path` in a document."""

    def __init__(self, document: Document, path: KeyPath, data: Mapping[str, Any]) -> None:
        self.document = document
        self.path = path
        self.data = data

    def __contains__(self, key: str) -> bool:
        return key in self.data

    @property
    def title(self) -> str:
        """The header of the table: [hosts.dgx-spark-1]."""
        return f"[{on_one_line('.'.join(toml_key(str(part)) for part in self.path))}]" if self.path else "the file"

    def only(self, known: Collection[str], hints: Mapping[str, str] | None = None) -> None:
        """Raise for a key that is not in `known`. `hints`: by key, in place of the nearest known key."""
        for key, value in self.data.items():
            if key not in known:
                hint = (hints or {}).get(key) or _hint(key, value, known)
                raise self.fault_at_key(key, f'unknown key "{on_one_line(key)}" in {self.title}', hint)

    def require(self, key: str, hint: str) -> None:
        """Raise if the table lacks this key."""
        if key not in self.data:
            what = f'missing key "{key}" in {self.title}' if self.path else f"missing table [{key}]"
            raise self.document.fault_at_value(self.path, what, hint)

    def value(self, key: str, kind: type[T], example: str) -> T:
        """The value of a required key, of exactly this type."""
        self.require(key, f"add {example}")
        return self._checked(key, self.data[key], kind, example)

    def boolean(self, key: str) -> bool:
        """true or false."""
        return self.value(key, bool, f"{key} = true")

    def integer(self, key: str, low: int, high: int, example: str = "") -> int:
        """An integer within bounds."""
        number = self.value(key, int, example or f"{key} = {low}")
        if not low <= number <= high:
            raise self.fault_at_value(key, f"{key} is out of range", f"from {low} to {high}")
        return number

    def choice(self, key: str, allowed: Sequence[L], example: str = "", *, number: str = "") -> L:
        """One of the allowed words. number: what a number means, if the key may also have one."""
        also = f", or {number}" if number else ""
        word = self.value(key, str, example or f'{key} = "{allowed[0]}"{also}')
        return self._allowed(word, allowed, key, (key,), also)

    def choices(self, key: str, allowed: Sequence[L]) -> tuple[L, ...]:
        """A list of allowed words, at least one, none twice."""
        words = self.strings(key, f'{key} = ["{allowed[0]}"]')
        if not words:
            raise self.fault_at_value(key, f"{key} is empty", one_of(allowed))
        return tuple(self._allowed(word, allowed, key, (key, index)) for index, word in enumerate(words))

    def strings(self, key: str, example: str) -> tuple[str, ...]:
        """A list of strings, none twice."""
        words = self.value(key, list, example)
        seen: set[str] = set()
        for index, word in enumerate(words):
            if not isinstance(word, str):
                raise self._fault((key, index), f"{key} holds strings, not {_kind(word)}", f"as in {example}")
            if word in seen:
                raise self._fault((key, index), f'{key} names "{on_one_line(word)}" twice', "keep one")
            seen.add(word)
        return tuple(words)

    def table(self, key: str, example: str) -> Table:
        """A table within this one."""
        return Table(self.document, (*self.path, key), self.value(key, dict, example))

    def tables(self, example: str) -> Iterator[tuple[str, Table]]:
        """All values of this table by name; each must be a table."""
        for key, value in self.data.items():
            if not isinstance(value, dict):
                raise self.fault_at_key(key, f'"{on_one_line(key)}" in {self.title} is not a table', f"as in {example}")
            yield key, Table(self.document, (*self.path, key), value)

    def fault_at_key(self, key: str, message: str, hint: str = "") -> ConfigError:
        """An error that points at a key."""
        return self.document.fault_at_key((*self.path, key), message, hint)

    def fault_at_value(self, key: str, message: str, hint: str = "") -> ConfigError:
        """An error that points at the value of a key."""
        return self._fault((key,), message, hint)

    def fault_at_element(self, key: str, index: int, message: str, hint: str = "") -> ConfigError:
        """An error that points at one element of a list."""
        return self._fault((key, index), message, hint)

    def _fault(self, below: KeyPath, message: str, hint: str) -> ConfigError:
        return self.document.fault_at_value((*self.path, *below), message, hint)

    def _checked(self, key: str, value: Any, kind: type[T], example: str) -> T:
        if type(value) is kind:  # not isinstance: bool is a subclass of int
            return value
        raise self.fault_at_value(key, f"{key} must be {_KINDS[kind]}, not {_kind(value)}", f"as in {example}")

    def _allowed(self, word: str, allowed: Sequence[L], key: str, below: KeyPath, also: str = "") -> L:
        for choice in allowed:
            if word == choice:
                return choice
        close = nearest(word, allowed)
        hint = f"{one_of(allowed)}{also}{f'; {close}' if close else ''}"
        raise self._fault(below, f'"{on_one_line(word)}" is not a value for {key}', hint)


def _hint(key: str, value: Any, known: Collection[str]) -> str:
    if hint := nearest(key, known):
        return hint
    if isinstance(value, dict):
        return "a name that holds a dot needs quotes"
    return f"there are {', '.join(known)}"


def _kind(value: Any) -> str:
    return _KINDS[type(value)]
