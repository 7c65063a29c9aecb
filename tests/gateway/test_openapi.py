"""Requests made from the gateway's OpenAPI document, with keys and without: each is answered as the document states.
docs/gateway.md has the command that makes many more of them to a running gateway."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi import checks
from starlette.types import ASGIApp

from disagg.gateway.clients.keys import KeyFile
from disagg.gateway.document import calls, gateway_document
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient
from tests.servers.test_openapi import for_each, operation_of, with_integers

EXAMPLES = 6
URL = "http://127.0.0.1:8080"
WITHOUT_PREFIX = {call.path.removeprefix("/v1") for call in calls() if call.path.startswith("/v1/")}
"""Their handlers are those of the same paths below /v1."""
CALLS = [(call.method, call.path) for call in calls() if call.path not in {*WITHOUT_PREFIX, "/api/live"}]
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
NEVER_200 = ("/v1/parallel", "/api/copy", "/api/pull", "/api/delete", "/api/v1/models/unload")
"""The requests of the first are bodies of other calls, which the document does not describe; the others are refused,
but for models of hosts with several."""
MODELS = {"enum": ["m", "alias-of-m"]}


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_any_request_is_answered_as_the_document_states(method: str, path: str) -> None:
    answered = Answered(fake_client.app(FakeClient("one ", "two ")), {})
    document = shallow(gateway_document(keyless=True))
    for_each(
        operation_of(narrow(document), method, path).as_strategy(GenerationMode.POSITIVE).map(with_integers),
        answered.check,
    )
    if path not in NEVER_200:
        assert answered.statuses[200], answered.statuses
    if method == "POST":
        for_each(operation_of(document, method, path).as_strategy(GenerationMode.NEGATIVE), answered.check, EXAMPLES)


@pytest.mark.parametrize("path", ["/v1/completions", "/api/show"])
def test_so_is_any_request_of_a_client_with_a_key(path: str, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {KeyFile(tmp_path / 'keys.json').add('test')}"}
    answered = Answered(fake_client.app(FakeClient("one "), tmp_path / "keys.json"), headers)
    document = shallow(gateway_document())
    for_each(
        operation_of(narrow(document), "POST", path).as_strategy(GenerationMode.POSITIVE).map(with_integers),
        answered.check,
    )
    assert answered.statuses[200] and not answered.statuses[401], answered.statuses


async def test_the_document_asks_for_a_key_once_there_is_one(tmp_path: Path) -> None:
    async with fake_client.http(fake_client.app(FakeClient(), tmp_path / "keys.json")) as http:
        before = (await http.get("/openapi.json")).json()["security"]
        KeyFile(tmp_path / "keys.json").add("test")
        after = (await http.get("/openapi.json")).json()["security"]
    assert (before, after) == ([{}, {"token": []}], [{"token": []}])


def test_a_client_without_its_key_is_refused_as_the_document_states(tmp_path: Path) -> None:
    KeyFile(tmp_path / "keys.json").add("test")
    application = fake_client.app(FakeClient("one "), tmp_path / "keys.json")
    document = gateway_document()
    for call in calls():
        of_path = {"model": "m"} if "{model}" in call.path else {}
        given: dict[str, Any] = {"body": {}} if call.body is not None else {}
        case = operation_of(document, call.method, call.path).Case(path_parameters=of_path, **given)
        answer = case.call(URL, app=application)
        case.validate_response(answer, checks=CHECKS[:4])
        assert (answer.status_code == 401) is not call.public, (call.path, answer.status_code)


class Answered:
    """Sends cases to an application, and counts the answers by their status."""

    def __init__(self, application: ASGIApp, headers: dict[str, str]) -> None:
        self._application, self._headers = application, headers
        self.statuses = Counter[int]()

    def check(self, case: Case[Any]) -> None:
        answer = case.call(URL, headers=self._headers, app=self._application)
        assert answer.status_code < 500, answer.text
        case.validate_response(answer, checks=CHECKS)
        self.statuses[answer.status_code] += 1


def shallow(document: dict[str, Any]) -> dict[str, Any]:
    """The document without schemas that refer to themselves or take any JSON, which take seconds to fill."""
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        for value in schema.get("properties", {}).values():
            of_anything = [one for one in (value, *value.get("anyOf", ())) if one.get("type") == "object"]
            for one in of_anything:
                one |= {"additionalProperties": False}
    for name, field in (("Block", "content"), ("Tool", "tools")):
        schemas[name]["properties"][field] = {"type": "null"}
    return document


def narrow(stated: dict[str, Any]) -> dict[str, Any]:
    """The document with the models that the fleet has."""
    document = copy.deepcopy(stated)
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = MODELS
    for path in ("/v1/models/{model}", "/models/{model}"):
        document["paths"][path]["get"]["parameters"][0]["schema"] = MODELS
    return document
