"""disagg/http/requests.py: what names a request, and what its body may have."""

from __future__ import annotations

import re

import pytest
from starlette.requests import Request
from starlette.types import Message

from disagg.errors import BodyTooLarge, RequestError
from disagg.http.requests import BodyBounds, body, body_bounds, request_id, traceparent

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


@pytest.mark.parametrize(
    ("context", "size", "marks"),
    [(1, 1 << 20, 50_000), (32_768, 2 << 20, 50_000), (131_072, 8 << 20, 50_000), (1 << 20, 64 << 20, 262_144)],
)
def test_a_body_is_bounded_by_the_context(context: int, size: int, marks: int) -> None:
    assert body_bounds(context) == BodyBounds(size, marks)


BOUNDS = BodyBounds(size=8, marks=3)


@pytest.mark.parametrize("given", [b"", b"12345678", b"[[[]]]", b"{{[]}}", b'"[{["', b"[[[:::"])
async def test_a_body_within_its_bounds_is_read(given: bytes) -> None:
    assert await body(sending(given), BOUNDS, "") == given


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (b"123456789", BodyTooLarge, "the request body is over 8 bytes"),
        (b"[[[[[[[[[", BodyTooLarge, "the request body is over 8 bytes"),
        (b"[[[[]]]]", RequestError, "the request body has over 3 of the characters [ and {"),
        (b"{{{{}}}}", RequestError, "the request body has over 3 of the characters [ and {"),
        (b'"[{[{"', RequestError, "the request body has over 3 of the characters [ and {"),
        (b"{::::}", RequestError, "the request body has over 3 of the character :"),
        (b'":: ::"', RequestError, "the request body has over 3 of the character :"),
    ],
)
async def test_a_body_beyond_its_bounds_is_refused_by_the_bound(
    given: bytes, kind: type[RequestError], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await body(sending(given), BOUNDS, "shorten it")
    assert (type(caught.value), caught.value.message, caught.value.hint) == (kind, message, "shorten it")


async def test_a_body_that_states_a_length_beyond_its_bound_is_refused_unread() -> None:
    async def receive() -> Message:
        raise AssertionError("the body was read")

    stated = Request({"type": "http", "headers": [(b"content-length", b"9")]}, receive)
    with pytest.raises(BodyTooLarge):
        await body(stated, BOUNDS, "")


def sending(data: bytes) -> Request:
    """A request with this body, in two parts."""
    parts: list[Message] = [
        {"type": "http.request", "body": data[:3], "more_body": True},
        {"type": "http.request", "body": data[3:]},
    ]

    async def receive() -> Message:
        return parts.pop(0)

    return Request({"type": "http", "headers": []}, receive)
