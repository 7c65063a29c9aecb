"""Tools that a model calls by itself: the official openai client, the real gateway, real servers, scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from starlette.types import ASGIApp

from disagg.api.sampling import Sampling
from disagg.config import load
from disagg.engines.base import Token
from disagg.engines.model.format import AnswerFormat, ToolFormat
from disagg.engines.simulated.model import ByteTokenizer, SimulatedModel
from disagg.gateway import serve
from disagg.gateway.app import build
from disagg.gateway.clients.access import Access
from disagg.gateway.clients.keys import KeyFile, KeyRing
from disagg.gateway.health import GatewayHealth
from disagg.http.protocol import Encryption
from disagg.http.server import listen
from disagg.inference.client import AsyncClient
from disagg.servers.app import build as build_server
from disagg.servers.run import listener_of, make_service
from disagg.tls.certificate import ServerTLS
from disagg.token import Tokens
from tests.fleets import TOKEN
from tests.gateway.fake_client import NO_KEYS
from tests.simulated import write_simulated

if TYPE_CHECKING:  # 2 s, which only the process that runs these tests spends
    import openai

PATIENCE_S: Final = 120.0
TOOLS: Final[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
ASKED: Final[Any] = [{"role": "user", "content": "How warm is it in Ulm?"}]
CALLS: Final = (
    "<think>Look it up.</think>\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Neu-Ulm"}}\n</tool_call>'
)
ANSWER: Final = "21 degrees in both."


def scripted(_: SimulatedModel, tokens: Sequence[int], sampling: Sampling, *rest: object) -> Iterator[Token]:
    """Two calls, or the answer once the prompt has a tool's result."""
    text = (ANSWER if b"tool: 21" in bytes(tokens) else CALLS).encode()
    for index, byte in enumerate(text, 1):
        yield Token(byte, 0.0, finish="stop" if index == len(text) else None)


@asynccontextmanager
async def serving(app: ASGIApp, listener: Any, encryption: Encryption) -> AsyncIterator[None]:
    server = serve.GatewayServer(app, encryption)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, PATIENCE_S)
        listener.close()


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[openai.AsyncOpenAI]:
    """Of a gateway in front of a prefill and a decode server, all in this process."""
    import openai

    tools = ToolFormat("<tool_call>", "</tool_call>", lambda text, _: json.loads(text))  # mlx-lm's takes 10 s to import
    monkeypatch.setattr(ByteTokenizer, "format", AnswerFormat(("<think>", "</think>"), tools))
    monkeypatch.setattr(SimulatedModel, "answer", scripted)
    fleet = load(write_simulated(tmp_path))
    async with AsyncExitStack() as stack:
        for host in fleet.hosts.values():
            service = make_service(fleet, host)
            stack.push_async_callback(service.close)
            await service.load()
            app = build_server(service, Tokens(TOKEN))
            await stack.enter_async_context(serving(app, listener_of(host), Encryption(ServerTLS(lambda: (TOKEN,)))))
        direct = await stack.enter_async_context(AsyncClient(fleet, token=TOKEN))
        listener = listen("127.0.0.1", 0, serve.HINTS)
        gateway = build(direct, Access(KeyRing(KeyFile(NO_KEYS)), public=False), GatewayHealth(direct))
        await stack.enter_async_context(serving(gateway, listener, Encryption()))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        yield await stack.enter_async_context(openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0))


async def test_calls_of_a_model_are_parsed_and_their_results_bring_its_answer(client: openai.AsyncOpenAI) -> None:
    first = (await client.chat.completions.create(model="m", messages=ASKED, tools=TOOLS)).choices[0]
    calls = first.message.tool_calls or []
    assert first.finish_reason == "tool_calls" and first.message.content is None
    assert first.message.model_extra["reasoning"] == "Look it up."
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Ulm"}),
        ("weather", {"city": "Neu-Ulm"}),
    ]
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in calls]
    messages = [*ASKED, first.message.model_dump(include={"role", "content", "tool_calls"}), *results]
    second = (await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)).choices[0]
    assert (second.finish_reason, second.message.content, second.message.tool_calls) == ("stop", ANSWER, None)


async def test_the_stream_has_the_same_calls(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="m", messages=ASKED, tools=TOOLS) as stream:
        events = [event.type async for event in stream]
        (choice,) = (await stream.get_final_completion()).choices
    assert events.count("tool_calls.function.arguments.done") == 2
    assert choice.finish_reason == "tool_calls"
    assert [call.function.arguments for call in choice.message.tool_calls or []] == [
        '{"city":"Ulm"}',
        '{"city":"Neu-Ulm"}',
    ]


async def test_an_answer_ends_after_its_first_call_if_the_caller_wants_no_more(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "messages": ASKED, "tools": TOOLS, "parallel_tool_calls": False}
    (whole,) = (await client.chat.completions.create(**asked)).choices
    async with client.chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    for choice in (whole, final.choices[0]):
        assert choice.finish_reason == "tool_calls"
        assert [call.function.arguments for call in choice.message.tool_calls or []] == ['{"city":"Ulm"}']
    tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
    response = await client.responses.create(model="m", input=ASKED, tools=tools, parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    assert response.parallel_tool_calls is False
