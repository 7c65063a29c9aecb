"""Calls for the tokens of a prompt: vLLM's, and that of OpenAI's responses."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.errors import ServerUnavailable
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"name": "f", "description": "", "parameters": {"type": "object"}}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_a_text_or_a_chat_is_tokenised(path: str) -> None:
    client = FakeClient()
    async with fake_client.http(fake_client.app(client)) as http:
        text = (await http.post(path, json={"model": "m", "prompt": "hello"})).json()
        named = {"model": "alias-of-m", "messages": MESSAGES, "tools": [TOOL], "return_token_strs": True}
        chat = (await http.post(path, json={**named, "chat_template_kwargs": {"enable_thinking": False}})).json()
    assert text == {"count": 2, "max_model_len": 4096, "tokens": [0, 1], "token_strs": None}
    assert chat["token_strs"] == ["t0 ", "t1 "]
    assert (client.asked[0]["prompt"], client.asked[1]["messages"]) == ("hello", MESSAGES)
    assert client.asked[1]["tools"] == [FLAT]
    assert client.asked[1]["chat_template_kwargs"] == {"enable_thinking": False}


async def test_a_chat_is_tokenised_as_its_prompt_would_end() -> None:
    client = FakeClient()
    begun = [*MESSAGES, {"role": "assistant", "content": "It"}]
    async with fake_client.http(fake_client.app(client)) as http:
        for fields in ({"continue_final_message": True}, {"add_generation_prompt": False}, {}):
            answer = await http.post("/tokenize", json={"model": "m", "messages": begun, **fields})
            assert answer.status_code == 200
            assert {**fields, "messages": begun}.items() <= client.asked[-1].items()


async def test_token_ids_become_text() -> None:
    async with fake_client.http(fake_client.app(FakeClient())) as http:
        answer = await http.post("/detokenize", json={"model": "m", "tokens": [7, 8]})
    assert answer.json() == {"prompt": "t7 t8 ", "content": "t7 t8 "}, "as vLLM's and llama.cpp's clients read it"


async def test_a_text_may_have_llama_cpp_s_name() -> None:
    client = FakeClient()
    async with fake_client.http(fake_client.app(client)) as http:
        answer = await http.post("/tokenize", json={"model": "m", "content": "hello"})
    assert answer.json()["tokens"] == [0, 1] and client.asked[0]["prompt"] == "hello"


async def test_the_tokens_of_a_response_s_input_are_counted() -> None:
    client = FakeClient()
    async with fake_client.http(fake_client.app(client)) as http:
        body = {
            "model": "m",
            "input": "hello",
            "instructions": "be short",
            "tools": [{"type": "function", "name": "f"}],
        }
        answer = await http.post("/v1/responses/input_tokens", json=body)
    assert answer.json() == {"object": "response.input_tokens", "input_tokens": 42}
    assert client.asked[0]["messages"] == [{"role": "system", "content": "be short"}, *MESSAGES]
    assert [tool["name"] for tool in client.asked[0]["tools"]] == ["f"]


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "content": "x"}, "prompt"),
        ("/tokenize", {"content": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"content": "x", "with_pieces": True}, "with_pieces"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/v1/responses/input_tokens", {}, "input"),
        ("/v1/responses/input_tokens", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
async def test_what_cannot_be_tokenised_is_refused_by_name(path: str, fields: dict[str, Any], named: str) -> None:
    async with fake_client.http(fake_client.app(FakeClient())) as http:
        answer = await http.post(path, json={"model": "m", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


async def test_a_host_that_does_not_answer_is_an_error_in_openai_s_form() -> None:
    async with fake_client.http(fake_client.app(FakeClient(ServerUnavailable("gone")))) as http:
        answer = await http.post("/tokenize", json={"model": "m", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_host_available")
