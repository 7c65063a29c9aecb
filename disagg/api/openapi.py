"""The OpenAPI document of an HTTP API, from a table of its routes. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from disagg.api.base import Contract
from disagg.errors import DisaggError, Overloaded

PATH: Final = "/openapi.json"
VERSION: Final = "3.2.0"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
TOKEN: Final = "token"
"""The name of the security scheme: a bearer token."""
_SCHEMAS: Final = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """One answer of a route. bodies: the types that its body may have, any that msgspec knows; none if it has no stated
    shape. events: of an answer that is streamed, the types of server-sent events by their names; "" for those without
    one, unnamed for more of these. An answer with bodies and events is either, as the request asks.
    headers: that it always has, with what they mean."""

    description: str
    bodies: tuple[Any, ...] = ()
    media: str = JSON
    events: Mapping[str, type[Contract]] = field(default_factory=dict)
    unnamed: tuple[type[Contract], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operation:
    """One call. path: as Starlette writes it, e.g. "/models/{name}". body: the type of its request body, which is JSON.
    query: types of the parameters after "?", by name. public: needs no token."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    answers: Mapping[int, AnswerSpec]
    body: Any = None
    query: Mapping[str, Any] = field(default_factory=dict)
    public: bool = False


def failures(kinds: Sequence[type[DisaggError]], body: Any) -> dict[int, AnswerSpec]:
    """The answers that report these errors, by HTTP status. body: the type in which an error is reported."""
    by_status: dict[int, list[type[DisaggError]]] = {}
    for kind in kinds:
        by_status.setdefault(kind.http_status, []).append(kind)
    return {
        status: AnswerSpec(
            " ".join(f"{kind.__name__}: {inspect.getdoc(kind)}" for kind in found),
            (body,),
            headers=_RETRY_AFTER if Overloaded in found else {},
        )
        for status, found in sorted(by_status.items())
    }


_RETRY_AFTER: Final = {"Retry-After": "seconds after which the caller may try again"}


def document(title: str, version: str, token: str, routes: Sequence[Operation]) -> dict[str, Any]:
    """The document. token: what the bearer token is, and where it comes from."""
    kinds = list(dict.fromkeys(kind for route in routes for kind in _types(route)))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS)
    known = dict(zip(kinds, schemas, strict=True))
    more = {kind.__name__: dict(kind.more_schema) for kind in kinds if _is_contract(kind)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, known)
    return {
        "openapi": VERSION,
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": {name: _tidy(schema) | more.get(name, {}) for name, schema in components.items()},
            "securitySchemes": {TOKEN: {"type": "http", "scheme": "bearer", "description": token}},
        },
        "security": [{TOKEN: []}],
    }


def _is_contract(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Contract)


def _types(route: Operation) -> Iterator[Any]:
    """Every type that the route names."""
    yield from (kind for kind in (route.body, *route.query.values()) if kind is not None)
    for answer in route.answers.values():
        yield from (*answer.bodies, *answer.events.values(), *answer.unnamed)


def _operation(route: Operation, known: Mapping[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "operationId": f"{route.method} {route.path}"}
    names = re.findall(r"\{(\w+)", route.path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    parameters += [{"name": name, "in": "query", "schema": known[kind]} for name, kind in route.query.items()]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": known[route.body]}}}
    operation["responses"] = {str(status): _response(one, known) for status, one in route.answers.items()}
    if route.public:
        operation["security"] = [{}, {TOKEN: []}]
    return operation


def _response(answer: AnswerSpec, known: Mapping[Any, Any]) -> dict[str, Any]:
    response: dict[str, Any] = {"description": answer.description}
    if answer.headers:
        response["headers"] = {
            name: {"description": meaning, "required": True, "schema": {"type": "string"}}
            for name, meaning in answer.headers.items()
        }
    content: dict[str, Any] = {}
    if answer.bodies:
        schemas = [known[kind] for kind in answer.bodies]
        content[answer.media] = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    if answer.events or answer.unnamed:
        named = [*answer.events.items(), *(("", kind) for kind in answer.unnamed)]
        content[EVENTS] = {"itemSchema": {"oneOf": [_event(name, known[kind]) for name, kind in named]}}
    if content:
        response["content"] = content
    return response


def _event(name: str, schema: Any) -> dict[str, Any]:
    """The schema of one server-sent event whose data is JSON of this schema."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    if not name:
        return {"required": ["data"], "properties": {"data": data, "event": False}}
    return {"required": ["event", "data"], "properties": {"event": {"const": name}, "data": data}}


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the indentation of the docstring that describes it."""
    text = schema.get("description")
    return schema if text is None else {**schema, "description": inspect.cleandoc(text)}
