"""What the form of an answer may cost: a schema before it is compiled, its processes, and why one was refused. Pure.

No message has text of a schema: messages go to logs and histories, where a caller's text does not belong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import IntEnum
from typing import Any, Final

from disagg.engines.model.matchers.notation import NOT_READ
from disagg.errors import RequestError, SchemaTooComplex

MAX_PARTS: Final = 10_000
"""Objects and lists of a schema."""
MAX_NESTING: Final = 100
"""Objects and lists in each other. llguidance's own bound is 128, with what is around the schema."""
MAX_DEPTH: Final = 500
"""Objects and lists that lead to each other, also by $ref: a compiler needs some of its stack for each."""
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
_NO_REGEX: Final = "it has no regular expression that llguidance follows"
_REASONS_OF_TEXT: Final = (
    ("look-?around", "it looks around, or at the edge of a word, which llguidance does not follow"),
    ("regex parse error|invalid regex", _NO_REGEX),
    ("no start rule", 'it has no rule "start"'),
    ("unknown special token", "it names a special token that the model does not have"),
    ("nknown name|undefined|unknown", "it uses a name that it does not define"),
    (NOT_READ, "it is neither in Lark's notation nor in GBNF"),
    ("xpected|lexer error|syntax", "it is not in Lark's notation as llguidance reads it"),
)
"""The same for regular expressions and grammars, by what they contain."""
_TOO_MUCH: Final = re.compile(
    "fuel exhausted|schema too large|grammar size|initial lexer|lexer precomputation|Schema intersection|"
    "Unable to determine|can't determine|.*recursion limit"
)
_TOO_MUCH_IN_TEXT: Final = re.compile(
    "fuel exhausted|grammar size|initial lexer|lexer precomputation|recursion limit|exceeds size limit|too (large|big)"
)
_KEYS: Final = (
    r"\$dynamicRef|\$recursiveRef|contains|dependencies|dependentRequired|dependentSchemas|else|if|maxContains|"
    r"minContains|not|propertyNames|then|unevaluatedItems|unevaluatedProperties|uniqueItems"
)
_DOCS: Final = "see JSON Schema in llguidance's docs"


def refusal(error: str, field: str = "json_schema") -> RequestError:
    """The error for a form that llguidance refuses. error: as llguidance states it, with text of the form. field: of
    the request, that has it."""
    if field != "json_schema":
        return _refusal_of_text(error, field)
    message = error.split("failed to compile JSON schema: ", 1)[-1].partition("\n")[0]
    if message.startswith("Unimplemented keys"):
        found = sorted({f'"{key}"' for key in re.findall(r"[\w$]+", message) if re.fullmatch(_KEYS, key)})
        return RequestError(f"json_schema: llguidance does not follow {', '.join(found)}", _HINT)
    if _TOO_MUCH.match(message):
        return SchemaTooComplex("json_schema: it is over a limit of llguidance", _HINT)
    known = (ours for theirs, ours in _REASONS if re.match(theirs, message))
    return RequestError(f"json_schema: {next(known, 'llguidance cannot follow it')}", _DOCS)


def _refusal_of_text(error: str, field: str) -> RequestError:
    if _TOO_MUCH_IN_TEXT.search(error):
        return SchemaTooComplex(f"{field}: it is over a limit of llguidance", f"simplify {field}")
    known = (ours for theirs, ours in _REASONS_OF_TEXT if re.search(theirs, error))
    reason = next(known, "llguidance cannot follow it")
    if field == "regex" and "Lark" in reason:  # around which it is written
        reason = _NO_REGEX
    return RequestError(f"{field}: {reason}", "see the syntax of grammars in llguidance's docs")


MIB: Final = 1 << 20


def _parser() -> dict[str, Any]:
    return {
        "max_items_in_row": 2_000,
        "initial_lexer_fuel": 1_000_000,
        "step_lexer_fuel": 200_000,
        "step_max_items": 50_000,
        "max_lexer_states": 100_000,
        "max_grammar_size": 500_000,
        "precompute_large_lexemes": True,
        "verbose_errors": False,
    }


@dataclass(frozen=True, slots=True)
class FormLimits:
    """Bounds on the processes that compile and follow forms.

    Measured with a schema of 64 KiB, the largest: compiled in at most 0.3 s and 30 MiB unless it was made to be slow,
    with a vocabulary of 150,000 tokens, too; and the slowest mask took 55 ms.

    compile_cpu_s: of the CPU, for compiling one form. step_cpu_s: for one token and the mask after it.
    process_bytes: by which a process may grow. all_bytes: by which all of them may. compiling: forms that are compiled
    at a time. waiting: forms that wait for that, beyond which a request is refused as Overloaded. idle: processes that
    are kept for the next answer of their form. idle_bytes: by which such a process may have grown. refused_s: for so
    long a form that was too much is refused without a second try. watch_s: between two looks at the memory. parser:
    llguidance's own limits. `verbose_errors` would quote the schema in errors.
    """

    compile_cpu_s: float = 3.0
    step_cpu_s: float = 1.0
    process_bytes: int = 256 * MIB
    all_bytes: int = 1024 * MIB
    compiling: int = 4
    waiting: int = 256
    idle: int = 16
    idle_bytes: int = 32 * MIB
    refused_s: float = 60.0
    watch_s: float = 0.05
    parser: dict[str, Any] = field(default_factory=_parser)


STEP_S: Final = 0.5
"""The engine waits for a mask no longer than this after the token before it: all its answers wait meanwhile."""
PATIENCE_S: Final = 2.0
"""The engine waits for the masks of one answer for so long in all, and PATIENCE_TOKEN_S more for each token."""
PATIENCE_TOKEN_S: Final = 0.02
COMPILED_S: Final = 60.0
"""A form that is neither compiled nor refused after so long, with its wait for others: the processes are stuck."""
REBUILDS: Final = 2
"""An answer whose process ended through no fault of its own goes on in a new one, at most so often."""


class Reason(IntEnum):
    """Why a form or its answer cannot go on."""

    NONE = 0
    TIME = 1  # compiling took over compile_cpu_s
    STEP = 2  # a token took over step_cpu_s
    MEMORY = 3  # its process grew by over process_bytes, or all by over all_bytes
    CRASH = 4  # its process ended by itself
    PARSER = 5  # one of llguidance's own limits
    REFUSED = 6  # llguidance cannot follow the schema; its text is in the shared memory
    TOKEN = 7  # a token of the answer is not allowed
    BUSY = 8  # too many forms wait
    LOST = 9  # its process ended for another reason: the answer can go on in a new one


def too_complex(reason: Reason, limits: FormLimits) -> str:
    """The bound that a form is over, for a message."""
    return {
        Reason.TIME: f"it is not compiled after {limits.compile_cpu_s:g} s",
        Reason.STEP: f"the next token is not found within {STEP_S:g} s",
        Reason.MEMORY: f"it takes over {limits.process_bytes // MIB} MiB",
        Reason.CRASH: "it ends the process that compiles it",
        Reason.PARSER: "it has too many ways to go on",
    }[reason]
