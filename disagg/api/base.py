"""The base of every type that crosses a process boundary."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from disagg.errors import ProtocolError

_MAX_QUOTED_CHARS = 60
_GOT = " (got "
_QUOTES = re.compile(r""" \(got |:? ["']""")
_UNKNOWN = re.compile(r"^.*: unknown field", re.DOTALL)  # whose name is the caller's
_MAX_NAMED = 1e12
T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
BoundShare = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""What accepted KV differs by, over the bound beyond which it is refuted."""
"""Tokens, requests or bytes, as another process states them."""
_preparing = threading.Lock()
_prepared: set[type] = set()


class InvalidValue(ValueError):
    """A value that does not fit its type. The text names the field, the reason and the value, in one line."""


def without_value(text: str) -> str:
    """The text of an InvalidValue, or of another error, up to the first value that it quotes: that may be a caller's
    text."""
    return _QUOTES.split(_UNKNOWN.sub("unknown field", text), maxsplit=1)[0]


def prepared(kind: type[T]) -> type[T]:
    """The type itself, once msgspec has read its annotations. msgspec does that at the first use of a type, and two
    threads that do it at the same time crash the process (segmentation fault in msgspec 0.22, seen in `disagg status`).
    """
    if kind not in _prepared:
        with _preparing:
            msgspec.json.Decoder(kind)
            _prepared.add(kind)
    return kind


class Contract(msgspec.Struct, frozen=True):
    """A frozen value with a JSON form. Reading ignores unknown fields, so that hosts of two versions can read each
    other's health; request bodies forbid them. more_schema: what its JSON Schema states beyond its fields."""

    more_schema: ClassVar[Mapping[str, Any]] = {}

    def to_json(self) -> dict[str, Any]:
        """The value as built-in types that `json` can write."""
        body: dict[str, Any] = msgspec.to_builtins(self)
        return body

    def to_bytes(self) -> bytes:
        """The value as JSON text, in UTF-8."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """The value that `to_json` returned. Raises InvalidValue if the body does not fit the type."""
        try:
            return msgspec.convert(body, prepared(cls), strict=True)
        except msgspec.ValidationError as error:
            raise InvalidValue(_one_line(str(error), body)) from None

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The value that `to_bytes` returned. Raises InvalidValue if it is not JSON or does not fit the type."""
        try:
            return msgspec.json.decode(data, type=prepared(cls))
        except msgspec.ValidationError as error:
            raise InvalidValue(_one_line(str(error), _untyped(data))) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidValue(f"not JSON: {str(error).removeprefix('JSON is malformed: ')}") from None
        except RecursionError:
            raise InvalidValue("nested too deeply") from None

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> Self:
        """The value whose fields the query of a URL has as text. Raises InvalidValue if it does not fit the type."""
        try:
            return msgspec.convert(dict(query), prepared(cls), strict=False)
        except msgspec.ValidationError as error:
            raise InvalidValue(_one_line(str(error), query)) from None

    @classmethod
    def received(cls, body: Any, sender: str) -> Self:
        """`from_json` of an answer of the server `sender`. Raises ProtocolError if it does not fit the type."""
        try:
            return cls.from_json(body)
        except InvalidValue as error:
            raise ProtocolError(
                f"{sender} sent a malformed {cls.__name__}: {error}", "deploy the same version of disagg everywhere"
            ) from None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What values a field may have. minimum, maximum: None if unbounded; exclusive_minimum: greater than `minimum`."""

    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False
    description: str = ""

    @property
    def text(self) -> str:
        """`0 to 10`, `over 0, at most 1`, `at least 0`; empty without bounds. Leaves out a bound of 64-bit integers."""
        low, high = self.minimum, self.maximum
        if low is None:
            return ""
        if high is None or high > _MAX_NAMED:
            return f"{'over' if self.exclusive_minimum else 'at least'} {low:g}"
        return f"over {low:g}, at most {high:,.10g}" if self.exclusive_minimum else f"{low:g} to {high:,.10g}"


def bounds(kind: type[Contract], field: str) -> Bounds:
    """The bounds and the description that the type states for one of its fields."""
    meta = _meta(get_type_hints(kind, include_extras=True)[field])
    if meta is None:
        return Bounds()
    low = meta.gt if meta.gt is not None else meta.ge
    return Bounds(low, meta.le, meta.gt is not None, meta.description or "")


def _meta(hint: Any) -> msgspec.Meta | None:
    if get_origin(hint) is Annotated:
        return next((part for part in get_args(hint)[1:] if isinstance(part, msgspec.Meta)), None)
    return next((meta for part in get_args(hint) if (meta := _meta(part)) is not None), None)


def _one_line(message: str, body: Any) -> str:
    """msgspec's "Expected `float` > 0.0 - at `$.sampling.top_p`" as "sampling.top_p: expected float > 0.0 (got 0)"."""
    reason, _, path = message.replace("`", "").partition(" - at ")
    place = path.removeprefix("$").removeprefix(".")
    reason = reason[:1].lower() + reason[1:]
    reason = "must not be empty" if reason == "expected str of length >= 1" else reason
    for prefix, short in _ABOUT_A_FIELD.items():
        if reason.startswith(prefix):
            place = ".".join(filter(None, (place, reason.removeprefix(prefix))))
            return f"{place}: {short}"
    return f"{place}: {reason}{_GOT}{_quoted(_value_at(body, place))})" if place else reason


_ABOUT_A_FIELD = {"object contains unknown field ": "unknown field", "object missing required field ": "missing"}


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED_CHARS else text[: _MAX_QUOTED_CHARS - 3] + "..."


def _untyped(data: bytes) -> Any:
    """The JSON value, for the text of an error; None if it is nested too deeply to be read without a type."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _value_at(body: Any, path: str) -> Any:
    """The value at a path like "messages[0].role"; None if there is none."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            body = body[int(index)] if index else body[name] if isinstance(body, Mapping) else getattr(body, name)
        except (KeyError, IndexError, TypeError, AttributeError):
            return None
    return body
