"""docs/http-api.md names every field of every type of disagg/api, with its type, bounds and default."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from disagg import errors
from disagg.api import events, keeper, requests, sampling, status
from disagg.api.base import Contract

PAGE = Path(__file__).parents[2] / "docs/http-api.md"
NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", bytes: "base64"}


def types() -> dict[str, type[Contract]]:
    """All types of the HTTP API by name."""
    modules = (sampling, requests, events, status, keeper)
    found = (value for module in modules for value in vars(module).values())
    return {kind.__name__: kind for kind in found if isinstance(kind, type) and issubclass(kind, Contract)}


def rows(kind: type[Contract]) -> list[tuple[str, ...]]:
    """(name, type and bounds) of the type's own fields; for request bodies also the default."""
    hints, inherited = get_type_hints(kind, include_extras=True), set(get_type_hints(kind.__bases__[0]))
    fields = [field for field in msgspec.structs.fields(kind) if field.name not in inherited]
    is_request = kind.__struct_config__.forbid_unknown_fields
    return [(f"`{one.name}`", described(hints[one.name]), *([default(one)] if is_request else [])) for one in fields]


def described(hint: Any) -> str:
    """A field's type and bounds in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return described(arguments[0]) + bounded(arguments[1])
    if origin in (Union, UnionType):
        return " or ".join(
            "null" if one is NoneType else described(one) for one in arguments if one is not msgspec.UnsetType
        )
    if origin is Literal:
        return ", ".join(f"`{json.dumps(one)}`" for one in arguments)
    if origin is tuple:
        inner = arguments[:1] if arguments[-1] is Ellipsis else arguments
        return ("list of " if arguments[-1] is Ellipsis else "pair of ") + ", ".join(map(described, inner))
    if origin is not None and issubclass(origin, Mapping):
        return "object"
    return NAMES.get(hint) or f"`{hint.__name__}`"


def bounded(meta: msgspec.Meta) -> str:
    if meta.min_length is not None or meta.max_length is not None:
        low = f"{meta.min_length} to " if meta.min_length else "at most "
        return f" (length {low}{number(meta.max_length)})"
    if meta.gt is not None:
        return f" (over {number(meta.gt)}, at most {number(meta.le)})"
    return f" ({number(meta.ge)} to {number(meta.le)})" if meta.ge is not None else ""


def number(value: Any) -> str:
    power = int(value).bit_length() - 1
    if value > 1 << 16 and value == 1 << power:
        return f"2^{power}"
    return f"2^{power + 1} - 1" if value > 1 << 16 and value == (1 << power + 1) - 1 else f"{value:g}"


def default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return "defaults" if isinstance(value, Contract) else f"`{json.dumps(value)}`"


def tables() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Each table of the page whose first column is named after a type: (type, its rows without the last column)."""
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE):
        header, _, *lines = [
            tuple(cell.strip() for cell in line.strip("|\n ").split(" | ")) for line in table.splitlines()
        ]
        if header[0] in types():
            yield header[0], [line[:-1] for line in lines]


def test_every_type_has_a_table() -> None:
    assert sorted(name for name, _ in tables()) == sorted(name for name, kind in types().items() if rows(kind))


@pytest.mark.parametrize("name", [name for name, kind in types().items() if rows(kind)])
def test_a_table_states_every_field_its_type_its_bounds_and_its_default(name: str) -> None:
    assert dict(tables())[name] == rows(types()[name])


def test_the_table_of_errors_states_each_http_status() -> None:
    lines = re.findall(r"^\| ([A-Z][A-Za-z, ]+) \| (\d{3}) \|", PAGE.read_text(), re.MULTILINE)
    stated = {code: int(status) for codes, status in lines for code in codes.split(", ")}
    assert stated == {code: getattr(errors, code).http_status for code in stated} and len(stated) >= 16
