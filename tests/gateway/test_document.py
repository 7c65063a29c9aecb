"""GET /openapi.json of the gateway."""

from __future__ import annotations

import re
from typing import Any

from disagg.gateway.document import calls
from disagg.http.server import RequestMiddleware
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient

OF_PAGE = re.compile(r"/|/[a-z]+\.(js|css|svg)")
"""The dashboard and its files."""


def routes(application: Any) -> set[tuple[str, str]]:
    """Method and path of every route for programs."""
    assert isinstance(application, RequestMiddleware)
    inner = application.app
    return {
        (method, path.replace(":path", ""))
        for route in inner.routes
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD" and not OF_PAGE.fullmatch(path := getattr(route, "path", ""))
    }


async def test_the_document_has_every_call_and_the_types_of_its_bodies() -> None:
    application = fake_client.app(FakeClient())
    assert routes(application) == {(call.method, call.path) for call in calls()}
    async with fake_client.http(application) as http:
        document = (await http.get("/openapi.json")).json()
    post = document["paths"]["/v1/chat/completions"]["post"]
    name = post["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/")[-1]
    assert {"model", "messages", "max_tokens"} <= set(document["components"]["schemas"][name]["properties"])
    assert {"400", "401", "429", "503"} <= set(post["responses"])
