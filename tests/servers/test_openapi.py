"""Requests made from the servers' own OpenAPI documents: each is answered as the document states."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi import checks

from disagg.api.calls import calls
from disagg.api.names import Role
from tests.deadlines import wait_until
from tests.faults.test_bodies import bugs, idle
from tests.fleets import TOKEN, RunningFleet

EXAMPLES = 12
STATED = {502, 503, 504}
"""5xx that a server may answer to these requests; 500 is a bug."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
CALLS = [(role, route.method, route.path) for role in ROLES for route in calls(role)]
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LIMITS: Mapping[str, Mapping[str, Any]] = {
    "model": {"enum": ["tiny", "alias-of-tiny"]},
    "prompt": {"type": "string", "minLength": 1, "maxLength": 50},
    "role": {"enum": ["system", "user", "assistant"]},
    "deadline_s": {"minimum": 20, "maximum": 30},
    "max_tokens": {"maximum": 4},
}
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 10, "maximum": 600}, "minItems": 2, "maxItems": 50}


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@pytest.mark.parametrize(("role", "method", "path"), CALLS)
def test_any_request_is_answered_as_the_document_states(
    tiny_fleet: RunningFleet, role: Role, method: str, path: str
) -> None:
    host = f"tiny-{role}"
    with tiny_fleet.http(host) as http:
        document = http.get("/openapi.json").json()
    refused, accepted = operation_of(document, method, path), operation_of(narrow(document, tiny_fleet), method, path)
    before, statuses = len(tiny_fleet.log(host)), Counter[int]()
    session = requests.Session()  # else each case reads the certificates of the whole web

    def answered(case: Case[Any]) -> None:
        answer = case.call(tiny_fleet.fleet.hosts[host].url, headers=HEADERS, timeout=60, session=session, verify=False)
        assert answer.status_code < 500 or answer.status_code in STATED, answer.text
        case.validate_response(answer, checks=CHECKS)
        statuses[answer.status_code] += 1

    for_each(accepted.as_strategy(GenerationMode.POSITIVE).map(with_integers), answered)
    expected = 502 if path == "/prefill" else 200  # nobody has issued the ticket
    assert statuses[expected] > statuses.total() / 5, statuses
    if method == "POST":
        for_each(refused.as_strategy(GenerationMode.NEGATIVE), answered)
    assert bugs(tiny_fleet.log(host)[before:]) == []
    wait_until(lambda: idle(tiny_fleet, host), 60, "the server to be idle")


def operation_of(document: dict[str, Any], method: str, path: str) -> Any:
    return schemathesis.openapi.from_dict(document)[path][method]


def for_each(cases: Any, check: Any, examples: int = EXAMPLES) -> None:
    """Check so many cases, the same ones in every run."""
    some: Any = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with_cases: Any = given
    some(with_cases(cases)(check))()


def narrow(stated: dict[str, Any], fleet: RunningFleet) -> dict[str, Any]:
    """The document with schemas of what reaches the engine and ends soon: a model that is served, a decode host that is
    known, short prompts and answers. The rest stays as the servers state it."""
    document = copy.deepcopy(stated)
    schemas, decode = document["components"]["schemas"], fleet.fleet.hosts["tiny-decode"]
    deliver = {"const": {"host": decode.address, "port": decode.kv_port}}
    for name, schema in schemas.items():
        if not name.endswith(("Body", "Message", "Sampling")):
            continue
        properties = schema["properties"]
        for field, value in properties.items():
            value.update(deliver if field == "deliver" else LIMITS.get(field, {}))
        if name.endswith("Body") and "deadline_s" in properties:
            properties["tokens"] = TOKENS
            if name == "DecodeBody":  # KV that never comes is waited for until then
                properties["deadline_s"].update(minimum=0.4, maximum=0.5)
            for field in ("messages", "answer_tokens", "lease_s", "tools", "chat_template_kwargs"):
                properties.pop(field)
            schema["required"].append("deadline_s")
            schema["oneOf"] = [{"required": [one]} for one in ("prompt", "tokens")]
    return document


def with_integers(case: Case[Any]) -> Case[Any]:
    """JSON Schema takes 4.0 for an integer; the servers do not."""
    case.body = _integers(case.body)
    return case


def _integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _integers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_integers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value
