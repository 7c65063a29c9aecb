"""GET /openapi.json states every call, and docs/http-api.md lists the same ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import pytest
from msgspec import Meta

from disagg.api import openapi
from disagg.api.base import Contract
from disagg.api.calls import KEEPER_CALLS, calls, keeper_document, server_document
from disagg.api.names import Role
from disagg.api.openapi import AnswerSpec, Operation
from disagg.errors import Overloaded, RequestError, UnknownModel
from tests.api.test_http_api import PAGE

ROLES: tuple[Role, ...] = get_args(Role)


class Wish(Contract, frozen=True, forbid_unknown_fields=True):
    """What a caller
    wants."""

    size: Annotated[int, Meta(ge=1, le=9)] = 1


def references(value: Any) -> Iterator[str]:
    """Every $ref in a document."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from references(one)


def test_a_route_becomes_an_operation_with_its_parameters_body_and_answers() -> None:
    answers = {200: AnswerSpec("Done.", (Wish,)), **openapi.failures((RequestError, Overloaded, UnknownModel), Wish)}
    route = Operation("POST", "/wishes/{name}", "Wish.", answers, Wish, query={"limit": int})
    document = openapi.document("wishes", "1", "a key", [route])
    operation = document["paths"]["/wishes/{name}"]["post"]
    reference = {"$ref": "#/components/schemas/Wish"}
    assert operation["parameters"] == [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},
        {"name": "limit", "in": "query", "schema": {"type": "integer"}},
    ]
    assert operation["requestBody"]["content"] == {"application/json": {"schema": reference}}
    assert list(operation["responses"]) == ["200", "400", "404", "503"]
    assert "Retry-After" in operation["responses"]["503"]["headers"]
    wish = document["components"]["schemas"]["Wish"]
    assert wish["properties"] == {"size": {"type": "integer", "minimum": 1, "maximum": 9, "default": 1}}
    assert (wish["description"], wish["additionalProperties"]) == ("What a caller\nwants.", False)


def test_only_a_public_route_can_be_called_without_the_token() -> None:
    routes = [
        Operation("GET", f"/{name}", name, {200: AnswerSpec("")}, public=name == "open") for name in ("open", "closed")
    ]
    document = openapi.document("routes", "1", "a key", routes)
    assert document["security"] == [{"token": []}]
    assert document["paths"]["/open"]["get"]["security"] == [{}, {"token": []}]
    assert "security" not in document["paths"]["/closed"]["get"]


def test_the_events_of_a_stream_are_stated_by_name_and_by_the_type_of_their_data() -> None:
    stream = AnswerSpec("Events.", media=openapi.EVENTS, events={"wish": Wish, "": Wish})
    document = openapi.document("wishes", "1", "a key", [Operation("GET", "/wishes", "Wishes.", {200: stream})])
    content = document["paths"]["/wishes"]["get"]["responses"]["200"]["content"]["text/event-stream"]
    named, nameless = content["itemSchema"]["oneOf"]
    assert named["properties"]["event"] == {"const": "wish"} and nameless["properties"]["event"] is False
    assert named["properties"]["data"]["contentSchema"] == {"$ref": "#/components/schemas/Wish"}


def test_an_answer_may_be_a_body_or_a_stream_as_the_request_asks() -> None:
    either = AnswerSpec("Either.", (Wish,), unnamed=(Wish, Wish))
    document = openapi.document("wishes", "1", "a key", [Operation("GET", "/wishes", "Wishes.", {200: either})])
    content = document["paths"]["/wishes"]["get"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    assert len(content["text/event-stream"]["itemSchema"]["oneOf"]) == 2


@pytest.mark.parametrize("role", ROLES)
def test_every_reference_of_a_servers_document_resolves(role: Role) -> None:
    require_known(json.loads(json.dumps(server_document(role))))


def test_and_of_a_keepers_document() -> None:
    require_known(json.loads(json.dumps(keeper_document())))


def require_known(document: dict[str, Any]) -> None:
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known


def test_a_prompt_is_given_in_exactly_one_way_in_the_schema_too() -> None:
    schema = server_document("decode")["components"]["schemas"]["DecodeBody"]
    assert [one["required"] for one in schema["oneOf"]] == [["prompt"], ["messages"], ["tokens"]]


def test_the_page_lists_the_calls_of_each_role_with_their_bodies() -> None:
    stated = re.findall(
        r"^\| \[`(\w+) (/[\w./]+)`\]\(.*?\) \| (\w+) \| (?:`(\w+)`)? *\|", PAGE.read_text(), re.MULTILINE
    )
    of_roles = {_row(route) for route in {one for role in ROLES for one in _hashable(role)}}
    known = {row[:2] for row in of_roles}
    of_keepers = {(one.method, one.path, "keeper", one.body.__name__ if one.body else "") for one in KEEPER_CALLS}
    assert sorted(stated) == sorted([*of_roles, *(row for row in of_keepers if row[:2] not in known)])


def _hashable(role: Role) -> list[tuple[str, str, str]]:
    return [(one.method, one.path, one.body.__name__ if one.body else "") for one in calls(role)]


def _row(call: tuple[str, str, str]) -> tuple[str, str, str, str]:
    method, path, body = call
    roles = [role for role in ROLES if call in _hashable(role)]
    return method, path, "both" if len(roles) == len(ROLES) else roles[0], body
