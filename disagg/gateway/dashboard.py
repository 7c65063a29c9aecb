"""Serves the files of the page. They hold no secret: what they show comes from /api/live, which needs a key."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE: Final = Path(__file__).parent / "page"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    """One route per file. The files are read once."""
    return [Route(path, _endpoint(name, kind), methods=["GET"]) for path, (name, kind) in _FILES.items()]


def _endpoint(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = (PAGE / name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return partial(_answer, content, {**_HEADERS, "Content-Type": kind, "ETag": tag})


async def _answer(content: bytes, headers: dict[str, str], request: Request) -> Response:
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers)
