"""The gateway in front of a whole-request host, a server of OpenAI's API in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from disagg.config import Fleet, Model
from disagg.gateway.app import build
from disagg.gateway.clients.access import Access
from disagg.gateway.clients.keys import KeyFile, KeyRing
from disagg.gateway.health import GatewayHealth
from disagg.gateway.watch.hosts import live_hosts
from disagg.inference.client import AsyncClient
from tests.gateway.fake_client import NO_KEYS, http
from tests.whole.fake_openai import Script, ended, openai_server, said, whole_host

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def gateway(script: Script) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncClient]]:
    with openai_server(script) as port:
        host = whole_host("m", port)
        fleet = Fleet("f", Path("hosts.toml"), {"m": Model("m", {}, 4096)}, {host.name: host})
        async with AsyncClient(fleet, token="the fleet's own token") as client:
            access = Access(KeyRing(KeyFile(NO_KEYS)), public=False)
            async with http(build(client, access, GatewayHealth(client))) as asking:
                yield asking, client


def lines(text: str) -> Sequence[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_a_chat_streams_through_with_the_usage_of_the_host() -> None:
    async with gateway(Script([said("Hel"), said("lo"), *ended("length", 7, 5)])) as (asking, client):
        await client.connect()
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        answer = await asking.post("/v1/chat/completions", json=body)
        health = await asking.get("/health")
        figures = (await asking.get("/metrics")).text
        hosts = live_hosts(client.fleet, client.view, 0.0)
    chunks = lines(answer.text)
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks if one["choices"]) == "Hello"
    assert chunks[-1]["usage"]["completion_tokens"] == 5 and chunks[-1]["usage"]["prompt_tokens"] == 7
    assert [one["choices"][0]["finish_reason"] for one in chunks if one["choices"]][-1] == "length"
    assert health.json()["status"] == "ok"
    assert [(host.name, host.role, host.state) for host in hosts] == [("ollama", "whole", "up")]
    assert 'vllm:generation_tokens_total{model_name="m"} 5.0' in figures
    assert 'disagg_requests_total{method="whole",model_name="m"} 1.0' in figures


async def test_log_probabilities_of_the_host_reach_the_client() -> None:
    token = {"token": "ok", "logprob": -0.1, "bytes": [111, 107], "top_logprobs": [{"token": "no", "logprob": -2.0}]}
    first = said("ok")
    first["choices"][0]["logprobs"] = {"content": [token]}
    async with gateway(Script([first, *ended("stop", 1, 1)])) as (asking, _):
        answer = await asking.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 1})
    (content,) = answer.json()["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["logprob"]) == ("ok", -0.1)
    assert [one["token"] for one in content["top_logprobs"]] == ["no"]


async def test_a_refused_key_is_no_host_for_the_client_and_is_not_tried_again() -> None:
    script = Script(status=401, content=b'{"error": {"message": "bad key"}}')
    async with gateway(script) as (asking, _):
        answer = await asking.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 503
    assert "refuses its key" in answer.json()["error"]["message"]


async def test_log_probabilities_are_those_of_the_text_also_after_reasoning() -> None:
    first = said("ok", reasoning="I think.")
    first["choices"][0]["logprobs"] = {"content": [{"token": "ok", "logprob": -0.1}]}
    last, usage = ended("stop", 1, 3)
    usage["usage"]["completion_tokens_details"] = {"reasoning_tokens": 2}
    body = {"model": "m", "input": "hi", "include": ["message.output_text.logprobs"]}
    async with gateway(Script([first, last, usage])) as (asking, _):
        answer = (await asking.post("/v1/responses", json=body)).json()
    (message,) = (item for item in answer["output"] if item["type"] == "message")
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["ok"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


async def test_tokens_that_cannot_be_counted_are_no_failure_of_the_gateway() -> None:
    async with gateway(Script()) as (asking, _):
        answer = await asking.post("/v1/messages/count_tokens", json=CHAT)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_request_that_comes_back_to_its_gateway_is_refused_at_once() -> None:
    script = Script([said("Hello"), *ended("stop", 7, 5)])
    async with gateway(script) as (asking, _):
        await asking.post("/v1/chat/completions", json=CHAT, headers={"Via": "1.1 nginx"})
        ((_, sent, _),) = script.asked
        back = await asking.post("/v1/chat/completions", json=CHAT, headers={"Via": f"1.1 nginx, {sent['Via']}"})
        several = await asking.post("/v1/parallel", json={"requests": [CHAT]}, headers={"Via": sent["Via"]})
    assert len(script.asked) == 1
    assert (back.status_code, back.json()["error"]["code"]) == (508, "request_loop")
    assert several.status_code == 508 and "this gateway already" in several.json()["error"]["message"]


async def test_each_gateway_on_the_way_of_a_loop_answers_with_the_same_error() -> None:
    script = Script(status=508, content=b'{"error": {"message": "been here"}}')
    async with gateway(script) as (asking, _):
        answer = await asking.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 508 and "retry-after" not in answer.headers
    assert "leads back to a gateway: been here (correct engine.url of ollama" in answer.json()["error"]["message"]
