"""JSON schemas that were made to harm whoever reads, compiles or follows them.

    @pytest.mark.parametrize("schema", schemas.hostile())

`POISONS` are those that have ended or blocked servers. `GROWTHS` are the dimensions in which a schema of at most
64 KiB, which requests may have, can grow; `hostile` has each at several sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pytest

Schema = dict[str, Any]
INTEGER: Final[Schema] = {"type": "integer"}
MAX_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Growth:
    """One dimension. make: the schema of a size. sizes: from harmless to the largest that 64 KiB have room for, or a
    caller could want."""

    name: str
    make: Callable[[int], Schema]
    sizes: tuple[int, ...]


def nested(levels: int, wrap: Callable[[Schema], Schema], inner: Schema = INTEGER) -> Schema:
    """`inner` in so many levels. Too deep for Python's own json module from about 300 on."""
    schema = inner
    for _ in range(levels):
        schema = wrap(schema)
    return schema


def closed(**properties: Schema) -> Schema:
    """An object with these properties, and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def chain(links: int, around: Callable[[Schema], Schema]) -> Schema:
    """Definitions of which each refers to the next, with something around the reference."""
    definitions = {f"{link}": around({"$ref": f"#/$defs/{link + 1}"}) for link in range(links)}
    return {"$defs": {**definitions, f"{links}": INTEGER}, "$ref": "#/$defs/0"}


def multiples(*numbers: float, word: str = "allOf") -> Schema:
    """Integers that are multiples of all of these, or of one."""
    return {word: [{"type": "integer", "multipleOf": number} for number in numbers]}


PRIMES: Final = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)

POISONS: Final[Mapping[str, Schema]] = {
    # overflows the stack of a compiler that follows references: SIGSEGV
    "references": chain(600, lambda link: nested(5, lambda inner: {"allOf": [inner]}, link)),
    # gigabytes, and more with every second
    "arithmetic": multiples(83, 89, 97),
    # 33 s of one core and 1.5 GiB each
    "large multiples": closed(**{f"p{index}": {"type": "integer", "multipleOf": 3000017} for index in range(6)}),
    # passes every check before compiling, then takes minutes
    "either of many": {
        "type": "object",
        "properties": {f"p{index}": {"type": "string"} for index in range(1000)},
        "additionalProperties": False,
        "minProperties": 1,
    },
}

GROWTHS: Final = (
    Growth("lists in lists", lambda n: nested(n, lambda inner: {"type": "array", "items": inner}), (10, 90, 1500)),
    Growth("objects in objects", lambda n: nested(n, lambda inner: closed(a=inner)), (10, 45, 600)),
    Growth("allOf in allOf", lambda n: nested(n, lambda inner: {"allOf": [inner]}), (10, 45, 3000)),
    Growth("anyOf in anyOf", lambda n: nested(n, lambda inner: {"anyOf": [inner, {"type": "null"}]}), (10, 45, 1500)),
    Growth("references", lambda n: chain(n, lambda link: link), (10, 100, 1600)),
    Growth("references in allOf", lambda n: chain(n, lambda link: {"allOf": [link]}), (10, 100, 1200)),
    Growth("references in objects", lambda n: chain(n, lambda link: closed(a=link)), (10, 100, 500)),
    Growth("references, doubled", lambda n: chain(n, lambda link: {"allOf": [link, link]}), (10, 100, 900)),
    Growth("properties", lambda n: closed(**{f"p{i}": {"type": "string"} for i in range(n)}), (10, 100, 1800)),
    Growth("optional properties", lambda n: {"properties": {f"p{i}": INTEGER for i in range(n)}}, (10, 300, 2200)),
    Growth("choices", lambda n: {"enum": [f"choice {i}" for i in range(n)]}, (10, 1000, 4000)),
    Growth("alternatives", lambda n: {"anyOf": [{"const": f"c{i}"} for i in range(n)]}, (10, 1000, 3000)),
    Growth(
        "exclusive alternatives",
        lambda n: {"oneOf": [{"type": "string", "minLength": i, "maxLength": i} for i in range(n)]},
        (10, 1000),
    ),
    Growth(
        "products of alternatives",
        lambda n: {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": 99 + i}], "type": "integer"} for i in range(n)]},
        (4, 12, 60),
    ),
    Growth("a multiple", multiples, (7, 997, 99991, 3000017, 10**15)),
    Growth("multiples of all", lambda n: multiples(*PRIMES[:n]), (2, 4, 6, 24)),
    Growth("multiples of one", lambda n: multiples(*PRIMES[:n], word="anyOf"), (2, 8, 24)),
    Growth("a fraction", lambda n: {"type": "number", "multipleOf": 10.0**-n}, (1, 9, 300)),
    Growth("a bound", lambda n: {"type": "integer", "minimum": -(10**n), "maximum": 10**n + 1}, (1, 15, 30)),
    Growth("letters", lambda n: {"type": "string", "minLength": n, "maxLength": 2 * n}, (10, 100_000, 10**12)),
    Growth("items", lambda n: {"type": "array", "items": INTEGER, "minItems": n, "maxItems": 2 * n}, (10, 10**6)),
    Growth("members", lambda n: {"type": "object", "minProperties": n}, (10, 10**6)),
    Growth("a long pattern", lambda n: {"type": "string", "pattern": "a" * n}, (10, 60_000)),
    Growth("a repeated pattern", lambda n: {"type": "string", "pattern": f"^(a|b){{{n}}}$"}, (10, 10**6)),
    Growth(
        "repeated repetitions",
        lambda n: {"type": "string", "pattern": "^" + "(" * n + "a" + "{1,99})" * n + "$"},
        (2, 5, 40),
    ),
    Growth("a pattern with many states", lambda n: {"type": "string", "pattern": f"(a|b)*a(a|b){{{n}}}"}, (10, 500)),
    Growth(
        "patterns at once",
        lambda n: {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(n)]},
        (2, 12, 40),
    ),
    Growth(
        "names by pattern",
        lambda n: {"patternProperties": {f"^{'x' * i}y+$": INTEGER for i in range(n)}},
        (2, 30, 200),
    ),
)


def grown() -> Iterator[tuple[str, Schema]]:
    """Every growth at every size, with its name."""
    for growth in GROWTHS:
        for size in growth.sizes:
            yield f"{growth.name}, {size}", growth.make(size)


def hostile() -> list[Any]:
    """Parameters of a test: each poison, and each growth at each size."""
    return [pytest.param(schema, id=name) for name, schema in (*POISONS.items(), *grown())]


def text(schema: Schema) -> str:
    """The schema as JSON, however deep it is."""
    return "".join(_pieces(schema))


def _pieces(schema: Schema) -> Iterator[str]:
    stack: list[Any] = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, _Text):
            yield value
        elif isinstance(value, dict):
            members: list[Any] = [_Text("{")]
            for index, (name, member) in enumerate(value.items()):
                members += [_Text(("," if index else "") + json.dumps(name) + ":"), member]
            stack += reversed([*members, _Text("}")])
        elif isinstance(value, list):
            items: list[Any] = [_Text("[")]
            for index, item in enumerate(value):
                items += [_Text("," if index else ""), item]
            stack += reversed([*items, _Text("]")])
        else:
            yield json.dumps(value)


class _Text(str):
    """A piece of JSON, not a value."""

    __slots__ = ()
