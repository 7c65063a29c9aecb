"""Responses of /v1/responses that are kept in memory for the requests that follow them, as many as the gateway is told
to keep. A key finds its own only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from disagg.errors import RequestError
from disagg.gateway.dialects.base import GatewayRequest, Written
from disagg.gateway.dialects.responses import FOLLOWS, items_of

MAX_BYTES: Final = 64 << 20
"""Of all that is kept, as JSON."""
PART: Final = 16
"""A response has at most this part of it: a request that follows one is read anew, also if it is short itself."""


class KeptResponses:
    """limit: how many are kept; 0: none. Beyond that, and beyond max_bytes, the oldest ones of the key that has most
    are forgotten: the most responses, or the most bytes."""

    def __init__(self, limit: int, max_bytes: int = MAX_BYTES) -> None:
        self._limit, self._max_bytes = limit, max_bytes
        self._of_keys: dict[str, _OfKey] = {}

    def __bool__(self) -> bool:
        return self._limit > 0

    def followed(self, key: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The body whose `input` begins with the items of the response that it follows. key: the id of the caller's.
        Raises RequestError if that response is not kept."""
        named = body.get(FOLLOWS)
        if not self or named is None:
            return body
        found = self._of_keys[key].kept.get(named) if key in self._of_keys and isinstance(named, str) else None
        if found is None:
            message = (
                f"{FOLLOWS}: this response is not kept: the last {self._limit} are, up to {self._largest} bytes each, "
                "until the gateway stops"
            )
            raise RequestError(message, "send its items in `input`")
        return {**body, "input": [*msgspec.json.decode(found), *items_of(body.get("input"))]}

    def keep(self, request: GatewayRequest, response: Written) -> None:
        """Keep the items of a request with those of its response."""
        items = msgspec.json.encode([*request.items, *response["output"]])
        if len(items) > self._largest:
            return
        own = self._of_keys.setdefault(request.options.get("cache_salt", ""), _OfKey())
        own.nbytes += len(items) - len(own.kept.pop(response["id"], b""))
        own.kept[response["id"]] = items
        while self._count > self._limit:
            self._forget_one("count")
        while self._nbytes > self._max_bytes:
            self._forget_one("nbytes")

    @property
    def _largest(self) -> int:
        return self._max_bytes // PART

    @property
    def _count(self) -> int:
        return sum(one.count for one in self._of_keys.values())

    @property
    def _nbytes(self) -> int:
        return sum(one.nbytes for one in self._of_keys.values())

    def _forget_one(self, most: Literal["count", "nbytes"]) -> None:
        """The oldest one of the key that has most of this."""
        key, own = max(self._of_keys.items(), key=lambda one: getattr(one[1], most))
        _, oldest = own.kept.popitem(last=False)
        own.nbytes -= len(oldest)
        if not own.kept:
            del self._of_keys[key]


@dataclass(slots=True)
class _OfKey:
    """What is kept for one key: conversations as JSON up to a response, by its id, the oldest first."""

    kept: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    nbytes: int = 0

    @property
    def count(self) -> int:
        return len(self.kept)
