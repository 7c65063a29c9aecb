"""What the gateway answers, as typed values; and what is asked again. Against a server that answers as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grader.errors import ModelError
from grader.models import MAX_ROOM, MAX_WAIT_S, Gateway, Reply, contexts, reply, retry_after, room, speeds, typed
from grader.prompts import ANSWER_TOKENS, Assessment, Feedback

CODE = {"id": "code", "model": "qwen"}
WRITING = {"id": "writing", "model": "gpt-oss"}
LISTED = {"data": [{"id": "a", "aliases": ["x", "y"], "max_model_len": 8192}, {"id": "b", "max_model_len": 32768}]}


class Script(Gateway):
    """A client that does not pause between tries. url: of a server from `serving`."""

    async def _wait(self, attempt: int, began: float, reason: str) -> None:
        if attempt == 20:
            raise ModelError(reason)


@asynccontextmanager
async def serving(answers: Sequence[Response]) -> AsyncIterator[tuple[Script, list[list[str]]]]:
    """A gateway that gives these answers in turn, and the ids of the requests that each was given to."""
    left, asked = [*answers], []

    async def answer(request: Request) -> Response:
        body = json.loads(await request.body() or b"{}")
        asked.append([one["id"] for one in body.get("requests", [])])
        return left.pop(0)

    routes = [Route("/v1/parallel", answer, methods=["POST"]), Route("/v1/models", answer)]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", ws="none"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    client = Script(f"http://127.0.0.1:{port}/v1")
    try:
        yield client, asked
    finally:
        await client.close()
        server.should_exit = True
        await task


def result(index: int, status: int = 200, content: str = "x", **body: Any) -> dict[str, Any]:
    choice = {"finish_reason": "stop", "message": {"content": content}}
    given = body or ({"choices": [choice]} if status == 200 else {"error": {"message": f"fault {status}"}})
    return {"index": index, "status": status, "seconds": 0.5, "body": given}


def together(*results: dict[str, Any], efficiency: float = 0.9) -> JSONResponse:
    return JSONResponse({"results": [*results], "disagg": {"efficiency": efficiency}})


async def test_both_answers_come_back_in_order_with_the_stated_efficiency() -> None:
    async with serving([together(result(1, content="w"), result(0, content="c"))]) as (gateway, asked):
        replies = await gateway.ask([CODE, WRITING])
    assert [one.content for one in replies.replies] == ["c", "w"]
    assert (replies.efficiency, asked) == (0.9, [["code", "writing"]])


async def test_only_what_has_no_answer_is_asked_again_and_then_there_is_no_efficiency() -> None:
    answers = [together(result(0, 503), result(1, content="w")), together(result(0, 429)), together(result(0))]
    async with serving(answers) as (gateway, asked):
        replies = await gateway.ask([CODE, WRITING])
    assert asked == [["code", "writing"], ["code"], ["code"]]
    assert [(one.content, one.run.retries) for one in replies.replies] == [("x", 2), ("w", 0)]
    assert replies.efficiency is None


async def test_a_gateway_that_is_full_or_away_is_asked_again() -> None:
    full = JSONResponse({"error": {"message": "full"}}, 503, {"Retry-After": "0"})
    async with serving([full, full, together(result(0))]) as (gateway, asked):
        assert (await gateway.ask([CODE])).replies[0].run.retries == 2
    assert len(asked) == 3
    with pytest.raises(ModelError, match="no answer from the gateway"):  # it is closed now
        await Script(str(gateway._client.base_url)).ask([CODE])


async def test_a_request_that_the_gateway_refuses_is_not_asked_again() -> None:
    refused = JSONResponse({"error": {"message": "no such key"}}, 401)
    async with serving([refused]) as (gateway, asked):
        with pytest.raises(ModelError, match="no such key"):
            await gateway.ask([CODE])
    assert len(asked) == 1


async def test_each_model_has_the_room_of_its_context_also_if_the_gateway_answers_late() -> None:
    late = JSONResponse({"error": {"message": "starting"}}, 503)
    async with serving([late, JSONResponse(LISTED)]) as (gateway, asked):
        assert await gateway.rooms(["y", "b"]) == {"y": room(8192), "b": room(32768)}
        assert await gateway.rooms(["b"]) == {"b": room(32768)}
    assert len(asked) == 2, "asked again for a model that is known"


async def test_a_model_that_is_not_served_is_an_error() -> None:
    async with serving([JSONResponse(LISTED)]) as (gateway, _):
        with pytest.raises(ModelError, match="does not serve c, z"):
            await gateway.rooms(["z", "b", "c"])


def test_contexts_are_known_by_name_and_alias() -> None:
    assert contexts(LISTED) == {"a": 8192, "x": 8192, "y": 8192, "b": 32768}
    assert contexts({"data": [{"id": "c", "max_model_len": None}]}) == {"c": 0}
    assert contexts({}) == {}


@pytest.mark.parametrize(("context", "characters"), [(0, 1000), (8192, 4092), (1 << 20, MAX_ROOM)])
def test_the_room_is_what_the_context_leaves_within_bounds(context: int, characters: int) -> None:
    assert room(context) == characters


FACTS = {
    "method": "disaggregated",
    "prefill_server": "p",
    "decode_server": "d",
    "ttft": 0.5,
    "total_time": 2.5,
    "ttft_parts": {"prefill": 0.25},
    "simulated": True,
    "warnings": ["slow link", "Using fallback mode"],
}
USAGE = {"prompt_tokens": 120, "completion_tokens": 41, "prompt_tokens_details": {"cached_tokens": 20}}


def answered(finish: str, facts: dict[str, Any] | None, usage: dict[str, Any] | None) -> Reply:
    choice = {"finish_reason": finish, "message": {"content": "x"}, "disagg": facts}
    return reply(CODE, result(0, choices=[choice], usage=usage), 1)


def test_a_run_has_what_the_gateway_stated() -> None:
    run = answered("stop", FACTS, USAGE).run
    assert (run.role, run.model, run.seconds, run.retries, run.error) == ("code", "qwen", 0.5, 1, "")
    assert (run.method, run.hosts, run.simulated, run.ttft) == ("disaggregated", "p and d", True, 0.5)
    assert (run.prefill_speed, run.decode_speed) == (400.0, 20.0)
    assert (run.prompt_tokens, run.completion_tokens) == (120, 41)
    assert run.fallback == "slow link; Using fallback mode"


@pytest.mark.parametrize(
    ("facts", "usage", "found"),
    [
        (FACTS, USAGE, {"prefill_speed": 400.0, "decode_speed": 20.0}),
        ({}, USAGE, {}),
        (FACTS, {}, {}),
        (FACTS, {"prompt_tokens": 120, "completion_tokens": 1}, {"prefill_speed": 480.0}),  # no time between tokens
        (FACTS, USAGE | {"prompt_tokens_details": {"cached_tokens": 120}}, {"decode_speed": 20.0}),  # all was held
        (FACTS, USAGE | {"prompt_tokens_details": {"cached_tokens": 71}}, {"decode_speed": 20.0}),  # nearly all
        (FACTS | {"ttft_parts": None}, USAGE | {"prompt_tokens_details": None}, {"decode_speed": 20.0}),
        (FACTS | {"total_time": 0.5}, USAGE, {"prefill_speed": 400.0}),
    ],
)
def test_speeds_are_stated_only_where_tokens_and_times_are(
    facts: dict[str, Any], usage: dict[str, Any], found: dict[str, float]
) -> None:
    assert speeds(facts, usage) == found


def test_an_answer_without_figures_is_an_answer() -> None:
    plain = answered("stop", None, None)
    assert (plain.content, plain.run.hosts, plain.run.ttft) == ("x", "", None)


def test_a_cut_answer_is_not_used_and_a_refused_one_has_its_error() -> None:
    cut, refused = answered("length", FACTS, USAGE), reply(CODE, result(0, 400), 0)
    assert (cut.content, cut.run.error) == (None, f"the answer is longer than {ANSWER_TOKENS} tokens")
    assert (refused.content, refused.run.error) == (None, "fault 400")
    assert typed(cut, Feedback) == (None, cut.run)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"sections": {"mean": {"points": 2, "comment": "c"}}, "total": 2}', ""),
        ('{"sections": {}, "total": 0}', ""),
        ("no JSON", "the answer does not fit its schema"),
        ('{"sections": {"mean": {"points": "2", "comment": "c"}}, "total": 2}', "sections.mean.points"),
        ('{"sections": {"mean": {"points": 1.5, "comment": "c"}}, "total": 2}', "sections.mean.points"),
        ('{"sections": {}, "total": true}', "total"),
        ('{"sections": {}}', "total"),
        ('{"sections": {}, "total": 0, "note": "full points"}', "note"),
        (json.dumps({"sections": {"mean": {"points": 2, "comment": "c" * 161}}, "total": 2}), "sections.mean.comment"),
    ],
)
def test_an_answer_is_used_only_if_it_fits_its_type(content: str, fault: str) -> None:
    given = Reply(content, answered("stop", FACTS, USAGE).run)
    assessment, run = typed(given, Assessment)
    assert (assessment is None) is bool(fault)
    assert fault in run.error and bool(run.error) is bool(fault)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        ("", 0.0),
        ("3", 3.0),
        ("0.5", 0.5),
        ("86400", MAX_WAIT_S),
        ("-1", 0.0),
        ("nan", 0.0),
        ("inf", MAX_WAIT_S),
        ("Sun, 22 Nov 2026 12:00:00 GMT", 0.0),
    ],
)
def test_the_gateways_wait_is_kept_within_bounds(header: str | None, seconds: float) -> None:
    assert retry_after(header) == seconds


async def test_a_gateway_that_does_not_answer_is_named_before_anything_is_graded() -> None:
    async with serving([]) as (gateway, _):
        pass  # its port is free again
    with pytest.raises(ModelError, match=r"no answer from the gateway at http://127.0.0.1:.*start `disagg serve`"):
        await (away := Gateway(str(gateway._client.base_url))).check()
    assert "no answer from the gateway" in away.waits_for


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_is_missing_is_said_at_once(status: int) -> None:
    """It will not come by waiting."""
    async with serving([JSONResponse({"error": {"message": "no key"}}, status)]) as (gateway, _):
        with pytest.raises(ModelError, match=r"the gateway refuses the key: set \$GRADER_KEY"):
            await gateway.check()
