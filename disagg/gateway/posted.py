"""A POST as it arrives: whose it is, which gateways have passed it on, and its body, a JSON object.

Gateways may have gateways as whole-request hosts: each adds its name to the Via header of what it sends on, and a
request that comes back to one is refused.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from disagg.errors import RequestError, RequestLoop
from disagg.gateway.clients.access import Access
from disagg.gateway.clients.keys import Key
from disagg.http import requests

MAX_HOPS: Final = 8
_NAME: Final = re.compile(r"\bdisagg-[0-9a-f]{16}\b")


@dataclass(frozen=True, slots=True)
class Posted:
    """What has arrived. key: None if none is needed. via: see `passed_on`. created: when it began to arrive, in seconds
    since 1970."""

    key: Key | None
    via: str
    body: Mapping[str, Any]
    request_id: str
    created: float
    receive: Receive


class PostReader:
    """Reads what arrives at one gateway. context: tokens of the largest prompt now."""

    def __init__(self, access: Access, context: Callable[[], int]) -> None:
        self._access, self._context, self._name = access, context, new_name()

    async def read(self, request: Request) -> Posted:
        """Raises Unauthorized, RequestLoop, RequestError, BodyTooLarge and Cancelled."""
        created = time.time()
        key = self._access.key(request)
        via = passed_on(request.headers.getlist("via"), self._name)
        body = _object(await requests.body(request, requests.body_bounds(self._context()), "shorten the prompt"))
        return Posted(key, via, body, request.scope[requests.REQUEST_ID_KEY], created, request.receive)


def new_name() -> str:
    """The name of one gateway, new at each start."""
    return f"disagg-{secrets.token_hex(8)}"


def passed_on(via: Sequence[str], name: str) -> str:
    """The Via header of what a request makes this gateway send. via: those of the request; other programs' entries
    are left out. Raises RequestLoop."""
    hops = _NAME.findall(", ".join(via))
    if name in hops:
        raise RequestLoop("the request has passed through this gateway already: engine.url of a host leads back to it")
    if len(hops) >= MAX_HOPS:
        raise RequestLoop(f"the request has passed through {len(hops)} gateways: at most {MAX_HOPS} may pass it on")
    return ", ".join(f"1.1 {hop}" for hop in (*hops, name))


def _object(data: bytes) -> Mapping[str, Any]:
    """The body, which must be a JSON object. Raises RequestError."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is not JSON: {_not_json(data, error)}") from None
    if not isinstance(body, dict):
        raise RequestError("the request body is not a JSON object")
    return body


def _not_json(data: bytes, error: Exception) -> str:
    """What is wrong with a body, where msgspec's own text would mislead."""
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        return f"byte {wrong.start} is not UTF-8"
    cut = "truncated" in str(error) and data.rstrip().endswith(b"}")
    return "a \\u escape in it is no character" if cut else str(error)
