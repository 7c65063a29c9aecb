"""JSON schemas before and after llguidance: what is refused before it is compiled, and why it was refused. Pure.

No message has text of a schema: messages go to logs and histories, where a caller's text does not belong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from disagg.errors import RequestError, SchemaTooComplex

MAX_PARTS: Final = 10_000
"""Objects and lists of a schema."""
MAX_NESTING: Final = 100
"""Of objects and lists in each other. llguidance's own bound is 128, with what is around the schema."""
MAX_DEPTH: Final = 500
"""Of objects and lists that lead to each other, also by $ref: a compiler needs some of its stack for each."""
MAX_MULTIPLE: Final = 100_000
"""The largest multipleOf, as an integer without its decimal point. An automaton has as many states: with this many,
compiling takes 0.45 s and 45 MiB."""
_HINT: Final = "simplify the JSON schema"


def require_bounded(schema: Mapping[str, Any]) -> None:
    """Raise SchemaTooComplex, which names the bound, for a schema that would obviously be too much to compile."""
    depth, heights, path = 0, dict[int, int](), [(schema, 0, _parts(schema, schema))]
    open_parts = {id(schema)}
    while path:
        part, nesting, inner = path[-1]
        for child, by_reference in inner:
            if id(child) in heights or id(child) in open_parts:
                continue
            deeper = 0 if by_reference else nesting + 1
            if deeper >= MAX_NESTING:
                raise _over(f"is nested over {MAX_NESTING} levels")
            if len(heights) + len(path) >= MAX_PARTS:
                raise _over(f"has over {MAX_PARTS} objects and lists")
            path.append((child, deeper, _parts(child, schema)))
            open_parts.add(id(child))
            break
        else:
            path.pop()
            open_parts.discard(id(part))
            height = 1 + max((heights.get(id(child), 0) for child, _ in _parts(part, schema)), default=0)
            heights[id(part)] = height
            depth = max(depth, height, len(path) + 1)
            if depth > MAX_DEPTH:
                raise _over(f"is over {MAX_DEPTH} levels deep, with its references")
            _require_multiple(part)


def _over(bound: str) -> SchemaTooComplex:
    return SchemaTooComplex(f"json_schema: it {bound}", _HINT)


def _parts(part: Any, schema: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    """The objects and lists of an object or list, and whether it refers to them."""
    for value in part.values() if isinstance(part, Mapping) else part:
        if isinstance(value, Mapping | list | tuple):
            yield value, False
    if isinstance(part, Mapping) and isinstance(reference := part.get("$ref"), str):
        target = _resolve(reference, schema)
        if isinstance(target, Mapping | list | tuple):
            yield target, True


def _resolve(reference: str, schema: Mapping[str, Any]) -> Any:
    """What a $ref names, as llguidance finds it; None if there is nothing."""
    found: Any = schema
    for name in reference.removeprefix("#").strip("/").split("/") if reference.strip("#/") else ():
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list | tuple):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            return None
    return found


def _require_multiple(part: Any) -> None:
    value = part.get("multipleOf") if isinstance(part, Mapping) else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        exact = abs(Decimal(repr(value)))
        if not exact.is_finite() or exact.scaleb(max(0, -int(exact.as_tuple().exponent))) > MAX_MULTIPLE:
            raise _over(f"has a multipleOf over {MAX_MULTIPLE}, without its decimal point")


_REASONS: Final = (
    ("Invalid type", '"type" is not one that JSON Schema has'),
    ("Unknown format", '"format" is not one that llguidance has'),
    ("Pointer|Resource|circular references", 'a "$ref" or "$schema" leads to nothing that can be used'),
    ("oneOf constraints", '"oneOf" is followed only where its schemas exclude each other'),
    ("invalid multiple of|Value for 'multipleOf'", '"multipleOf" is 0, or has too many digits'),
    ("patternProperty", 'two of "patternProperties" fit the same name'),
    ("min/maxProperties", '"minProperties" and "maxProperties" are followed only where all properties are required'),
    ("Unsatisfiable schema: min", "a minimum is above its maximum"),
    ("Unsatisfiable schema", "nothing fits it"),
    ("regex parse error", 'a "pattern" is not a regular expression that llguidance follows'),
    ("Failed to generate regex|Infinite|Overflow|Invalid range", "the bounds of a number are too large"),
    ("Expected|[a-z]\\w+ must be", "a keyword has a value that it cannot have"),
)
"""llguidance's messages by how they begin, and ours. What follows in its own may be text of the schema."""
_TOO_MUCH: Final = re.compile(
    "fuel exhausted|schema too large|grammar size|initial lexer|lexer precomputation|Schema intersection|"
    "Unable to determine|can't determine|.*recursion limit"
)
_KEYS: Final = (
    r"\$dynamicRef|\$recursiveRef|contains|dependencies|dependentRequired|dependentSchemas|else|if|maxContains|"
    r"minContains|not|propertyNames|then|unevaluatedItems|unevaluatedProperties|uniqueItems"
)
_DOCS: Final = "see JSON Schema in llguidance's docs"


def refusal(error: str) -> RequestError:
    """The error for a schema that llguidance refuses. error: as llguidance states it, with text of the schema."""
    message = error.split("failed to compile JSON schema: ", 1)[-1].partition("\n")[0]
    if message.startswith("Unimplemented keys"):
        found = sorted({f'"{key}"' for key in re.findall(r"[\w$]+", message) if re.fullmatch(_KEYS, key)})
        return RequestError(f"json_schema: llguidance does not follow {', '.join(found)}", _HINT)
    if _TOO_MUCH.match(message):
        return SchemaTooComplex("json_schema: it is over a limit of llguidance", _HINT)
    known = (ours for theirs, ours in _REASONS if re.match(theirs, message))
    return RequestError(f"json_schema: {next(known, 'llguidance cannot follow it')}", _DOCS)
