"""The HTTP of a keeper: who closes the connection of a load gives the place in the queue up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from disagg.keeper.app import build
from disagg.token import Tokens
from tests.fleets import TOKEN
from tests.keeper.keeping import MODEL_BYTES, begin_request, end_request, keeping, loaded, states, until, write


@pytest.mark.slow
async def test_a_caller_that_disconnects_gives_its_place_up(tmp_path: Path) -> None:
    async with keeping(write(tmp_path, ["a", "b"], f"memory_bytes = {MODEL_BYTES}")) as keeper:
        app, left, sent = build(keeper, Tokens(TOKEN)), asyncio.Event(), list[dict[str, Any]]()
        await loaded(keeper, "a")
        await begin_request(keeper, "a")
        body = iter([{"type": "http.request", "body": b'{"model": "b"}', "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (message := next(body, None)) is not None:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/models/load",
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
            "state": {},
        }
        asking = asyncio.ensure_future(app(scope, receive, send))
        await until(lambda: len(sent) > 1 and keeper.stated()[1].waiting == 1)
        assert sent[0]["status"] == 200 and sent[1]["body"].startswith(b"event: load\ndata: ")
        left.set()
        await asking
        assert keeper.stated()[1].waiting == 0
        end_request(keeper, "a")
        await until(lambda: keeper.stated()[0].state in ("ready", "asleep") and not keeper.stated()[0].running)
        assert states(keeper)["b"] == "asleep" and keeper.stated()[1].loads == 0
