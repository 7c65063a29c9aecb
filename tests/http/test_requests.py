"""disagg/http/requests.py: what names a request."""

from __future__ import annotations

import re

import pytest
from starlette.requests import Request

from disagg.http.requests import request_id, traceparent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def request(**headers: str) -> Request:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": named})


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x_request_id": "mine.1"}, "mine.1"),
        ({"x_request_id": "mine.1", "traceparent": PARENT}, "mine.1"),
        ({"traceparent": PARENT}, TRACE),
        ({"x_request_id": "not mine", "traceparent": PARENT}, TRACE),
    ],
)
def test_a_request_has_its_callers_id_or_that_of_its_trace(headers: dict[str, str], expected: str) -> None:
    assert request_id(request(**headers)) == expected


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "é"])
def test_an_id_that_is_missing_or_not_usable_is_replaced(given: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", request_id(request(x_request_id=given)))


@pytest.mark.parametrize(
    "given",
    [PARENT[:-1], PARENT.upper(), f"ff{PARENT[2:]}", PARENT.replace(TRACE, "0" * 32), PARENT.replace("f067", "zzzz")],
)
def test_a_trace_context_that_is_not_valid_is_ignored(given: str) -> None:
    assert traceparent(request(traceparent=given)) == ""
