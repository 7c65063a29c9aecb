"""Web pages of elsewhere: what a browser is told before it asks, and lets them read."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.gateway.clients.keys import KeyFile
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


async def test_by_default_no_page_of_elsewhere_may_ask() -> None:
    async with fake_client.http(fake_client.app(FakeClient("text ")), origin=PAGE) as http:
        before = await http.options("/v1/chat/completions", headers=ASKS)
        answer = await http.post("/v1/chat/completions", json=CHAT)
    assert (before.status_code, answer.status_code) == (405, 401)
    assert not [name for one in (before, answer) for name in one.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/models"])
async def test_a_browser_is_told_that_a_listed_page_may_ask(path: str) -> None:
    async with fake_client.http(fake_client.app(FakeClient(), origins=[PAGE]), origin=PAGE) as http:
        told = await http.options(path, headers={**ASKS, "access-control-request-private-network": "true"})
    assert told.status_code == 200
    assert told.headers["access-control-allow-origin"] == PAGE and "origin" in told.headers["vary"].lower()
    assert "POST" in told.headers["access-control-allow-methods"]
    assert told.headers["access-control-allow-headers"] == ASKS["access-control-request-headers"]
    assert told.headers["access-control-allow-private-network"] == "true"


async def test_a_listed_page_reads_answers_streams_and_errors_without_a_key_on_this_machine() -> None:
    async with fake_client.http(fake_client.app(FakeClient("text "), origins=[PAGE]), origin=PAGE) as http:
        answers = [
            await http.post("/v1/chat/completions", json=CHAT),
            await http.post("/v1/chat/completions", json={**CHAT, "stream": True}),
            await http.post("/v1/chat/completions", json={}),
            await http.get("/nowhere"),
        ]
    assert [one.status_code for one in answers] == [200, 200, 400, 404]
    assert {one.headers["access-control-allow-origin"] for one in answers} == {PAGE}
    assert all(
        "Origin" in one.headers["vary"] and "X-Request-Id" in one.headers["access-control-expose-headers"]
        for one in answers
    )


@pytest.mark.parametrize("origins", [[PAGE], ["*"]])
async def test_an_unlisted_page_needs_a_key_and_reads_nothing_unless_all_may(
    origins: list[str], tmp_path: Path
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    async with fake_client.http(fake_client.app(FakeClient("text "), file.path, origins=origins), origin=OTHER) as http:
        keyless = await http.post("/v1/chat/completions", json=CHAT)
        secret = file.add("page")
        answer = await http.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {secret}"})
    assert (keyless.status_code, answer.status_code) == (401, 200)
    assert answer.headers.get("access-control-allow-origin") == (OTHER if origins == ["*"] else None)


async def test_a_browser_is_told_nothing_of_an_unlisted_page() -> None:
    async with fake_client.http(fake_client.app(FakeClient(), origins=[PAGE]), origin=OTHER) as http:
        told = await http.options("/v1/chat/completions", headers=ASKS)
    assert told.status_code == 200
    assert not [name for name in told.headers if name.startswith("access-control")]


async def test_headers_that_are_no_names_are_not_sent_back() -> None:
    async with fake_client.http(fake_client.app(FakeClient(), origins=["*"]), origin=OTHER) as http:
        wrong = {**ASKS, "access-control-request-headers": "a: b; c"}
        told = await http.options("/v1/models", headers=wrong)
    assert told.status_code == 200 and "access-control-allow-headers" not in told.headers


async def test_programs_without_an_origin_see_no_difference() -> None:
    async with fake_client.http(fake_client.app(FakeClient("text "), origins=[PAGE])) as http:
        answer = await http.post("/v1/chat/completions", json=CHAT)
        options = await http.options("/v1/models")
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
    assert options.status_code == 405
