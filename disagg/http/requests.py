"""What every request to a disagg server has: an id, and a body of bounded size that arrives in bounded time."""

from __future__ import annotations

import asyncio
import re
import secrets
from dataclasses import dataclass
from typing import Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from disagg.api.base import Contract, InvalidValue
from disagg.api.requests import MIN_BODY_LIMIT, body_limit
from disagg.errors import BodyTooLarge, Cancelled, RequestError

Received = TypeVar("Received", bound=Contract)
BODY_S = 60.0  # for a whole request body to arrive
MIN_MARKS: Final = 50_000
TOKENS_PER_MARK: Final = 4  # of context: source code and most JSON have more
REQUEST_ID: Final = "X-Request-Id"
TRACEPARENT: Final = "traceparent"
REQUEST_ID_KEY: Final = "disagg.request_id"  # in the ASGI scope


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """What a request body may have. size: bytes. marks: characters `[` and `{` together, and characters `:`, also in
    texts, since each list, each object and each member of one takes a parser a fraction of a microsecond, during which
    nothing else of the process runs."""

    size: int = MIN_BODY_LIMIT
    marks: int = MIN_MARKS


def body_bounds(context: int) -> BodyBounds:
    """context: tokens of the largest prompt."""
    return BodyBounds(body_limit(context), max(MIN_MARKS, context // TOKENS_PER_MARK))


def request_id(request: Request) -> str:
    """The caller's id of this request if it is usable, else the id of its trace, else a new one."""
    given = request.headers.get(REQUEST_ID, "")
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given):
        return given
    trace = traceparent(request)
    return trace.split("-")[1] if trace else secrets.token_hex(8)


def bearer(request: Request) -> str:
    """The token in its Authorization, empty if it has none. The scheme may be written in any case."""
    given = request.headers.get("authorization", "")
    return given[len("Bearer ") :] if given[: len("Bearer ")].lower() == "bearer " else given


def traceparent(request: Request) -> str:
    """The caller's W3C trace context; empty if it has none, or one that is not valid."""
    given = request.headers.get(TRACEPARENT, "")
    found = re.fullmatch(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}", given)
    return given if found and found[1].strip("0") and found[2].strip("0") and given[:2] != "ff" else ""


def parsed(kind: type[Received], data: bytes) -> Received:
    """The validated body. Raises a RequestError of one line that names the first bad field."""
    try:
        return kind.from_bytes(data)
    except InvalidValue as error:
        raise RequestError(f"bad request body: {error}", "see docs/http-api.md for the request bodies") from None


async def body(request: Request, bounds: BodyBounds, hint: str) -> bytes:
    """The whole body. Raises BodyTooLarge with this hint if it is too long, RequestError with this hint if it has too
    many marks, RequestError if it does not arrive in time, Cancelled if the caller disconnects."""
    try:
        data = await _read(request, bounds.size)
    except TimeoutError:
        raise RequestError(f"the request body did not arrive within {BODY_S:g} s", "send it at once") from None
    except ClientDisconnect:
        raise Cancelled("the caller disconnected before its request body had arrived") from None
    if data is None:
        raise BodyTooLarge(f"the request body is over {bounds.size} bytes", hint)
    if data.count(b"[") + data.count(b"{") > bounds.marks:
        raise RequestError(f"the request body has over {bounds.marks} of the characters [ and {{", hint)
    if data.count(b":") > bounds.marks:
        raise RequestError(f"the request body has over {bounds.marks} of the character :", hint)
    return data


async def disconnected(receive: Receive) -> None:
    """Return when the caller disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, limit: int) -> bytes | None:
    """The whole body, or None if it is longer than `limit` bytes, also if it only states so. Raises TimeoutError after
    BODY_S."""
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > limit:
        return None
    data = bytearray()
    async with asyncio.timeout(BODY_S):
        async for part in request.stream():
            data += part
            if len(data) > limit:
                return None
    return bytes(data)
