"""Texts of requests are in neither the gateway's log nor its history, whatever is wrong with a request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fleets import RunningFleet

CANARY = "Canary"
SCHEMAS: list[Any] = [
    {"type": CANARY},
    {"type": "string", "pattern": f"(?={CANARY})"},
    {"$ref": f"#/{CANARY}"},
    {"type": "object", "properties": {CANARY: False}, "required": [CANARY]},
    {"title": CANARY, "multipleOf": 1e300},
    {"enum": [CANARY], "type": "integer"},
]
BODIES: list[dict[str, Any]] = [
    *({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": one}}} for one in SCHEMAS),
    {"temperature": CANARY},
    {"messages": [{"role": CANARY, "content": "x"}]},
    {"messages": [{"role": "user", "content": {"text": CANARY}}]},
    {"tools": [{"type": "function", "function": {"name": f"{CANARY} !", "parameters": {}}}]},
    {"stop": [CANARY, 7]},
    {"messages": [{"role": "user", "content": CANARY * 40_000}]},
    {CANARY: CANARY, "max_tokens": CANARY},
    {"max_tokens": 3},  # answered
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_request_says_is_in_no_log_and_no_history(gateway: str, tiny_fleet: RunningFleet, stream: bool) -> None:
    log = tiny_fleet.folder / "gateway.log"
    before = log.stat().st_size
    chat = {"model": "tiny", "messages": [{"role": "user", "content": CANARY}], "stream": stream}
    with httpx.Client(base_url=gateway, timeout=60) as client:
        answers = [client.post("/v1/chat/completions", json={**chat, **body}) for body in BODIES]
        entries = client.get("/api/history").text
    assert [answer.status_code for answer in answers] == [400] * (len(BODIES) - 1) + [200]
    lines = log.read_bytes()[before:].decode()
    assert lines.count("request_ended") >= len(SCHEMAS)
    assert CANARY.lower() not in lines.lower() and CANARY.lower() not in entries.lower()
