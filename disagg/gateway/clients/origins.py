"""Which web pages may ask the gateway: browsers let a page of elsewhere read an answer only if it names the page's
origin (CORS)."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS: Final = "GET, POST, HEAD"
EXPOSED: Final = "Retry-After, X-Request-Id, X-Should-Retry"
MAX_AGE_S: Final = 600
"""How long a browser may rely on what it was told of a path."""
_HEADERS: Final = re.compile(r"[A-Za-z0-9, _-]{1,1024}")
ANY: Final = "*"


class Origins:
    """The origins of the pages that may ask. ANY stands for all of them, whose callers need a key."""

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self._allowed = frozenset(allowed)

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def allows(self, origin: str) -> bool:
        """Whether a page of this origin may read answers."""
        return bool(origin) and (ANY in self._allowed or self.names(origin))

    def names(self, origin: str) -> bool:
        """Whether this origin is listed itself, so that its pages are trusted as programs of this machine are."""
        return origin in self._allowed


class CrossOrigin:
    """Outermost ASGI layer of a gateway with origins: answers what browsers ask before a request of a page, and names
    the page's origin in the answers to it."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self.app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin", "")
        allowed = self._origins.allows(origin)
        if origin and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            # An unlisted page gets 200, too: its browser then names the origin as the reason, not OPTIONS.
            told = _told(headers, origin) if allowed else {"Vary": "Origin"}
            await Response(headers=told)(scope, receive, send)
        elif not allowed:
            await self.app(scope, receive, send)
        else:
            await self.app(scope, receive, _naming(send, origin))


def _told(asked: Headers, origin: str) -> dict[str, str]:
    """What a browser is told before the request."""
    wanted = asked.get("access-control-request-headers", "")
    told = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Max-Age": str(MAX_AGE_S),
        "Vary": "Origin, Access-Control-Request-Headers",
    }
    if _HEADERS.fullmatch(wanted):
        told["Access-Control-Allow-Headers"] = wanted
    if asked.get("access-control-request-private-network") == "true":
        told["Access-Control-Allow-Private-Network"] = "true"
    return told


def _naming(send: Send, origin: str) -> Send:
    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = EXPOSED
            headers.add_vary_header("Origin")
        await send(message)

    return send_named
