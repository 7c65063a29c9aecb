"""Requests on a whole-request host, against a server of OpenAI's API in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from disagg.config import EngineOptions, Fleet, Host, Model
from disagg.errors import (
    CapabilityMissing,
    ConfigError,
    ContextLengthExceeded,
    DisaggError,
    RequestError,
    ServerNotRunning,
    ServerRefused,
    ServerUnavailable,
)
from disagg.inference.attempts.suspects import Suspicion
from disagg.inference.client import AsyncClient, Client
from disagg.inference.hosts import background
from disagg.inference.hosts.view import UNKNOWN
from tests.inference.scripted import FixedHost
from tests.whole.fake_openai import MODEL_THERE, Script, ended, openai_server, said, whole_host, with_whole

CHAT = [{"role": "user", "content": "hello"}]
MODELS = {"m": Model("m", {}, 4096)}


def fleet(*hosts: Host) -> Fleet:
    return Fleet("f", Path("hosts.toml"), MODELS, {host.name: host for host in hosts})


def client(host: Host) -> Client:
    return Client(fleet(host), token="the fleet's own token")


def test_an_answer_comes_with_its_times_and_the_tokens_of_its_usage() -> None:
    script = Script([said("Hel", role="assistant"), said("lo"), *ended("length")])
    with openai_server(script) as port, client(whole_host("m", port)) as asking:
        answer = asking.generate("m", messages=CHAT, max_tokens=3)
    metrics = answer.metrics
    assert (answer.text, answer.finish_reason, answer.warnings) == ("Hello", "length", ())
    assert (metrics.method, metrics.prefill_server, metrics.decode_server) == ("whole", None, "ollama")
    assert (metrics.prompt_tokens, metrics.completion_tokens, metrics.total_tokens) == (7, 3, 10)
    assert 0 < metrics.ttft <= metrics.total_time and metrics.kv_bytes == 0
    assert metrics.ttft == pytest.approx(metrics.ttft_parts.total)
    assert metrics.ttft_parts.whole > 0 and metrics.prefill_speed is None
    path, _, body = script.asked[-1]
    assert path == "/v1/chat/completions"
    assert body["model"] == MODEL_THERE and body["stream_options"] == {"include_usage": True}


def test_reasoning_and_tool_calls_pass_through() -> None:
    part = {"index": 0, "id": "call_9", "function": {"name": "add", "arguments": '{"a": '}}
    rest = {"index": 0, "function": {"arguments": "1}"}}
    pieces = [said("", reasoning="I add."), said("", tool_calls=[part]), said("", tool_calls=[rest]), *ended("stop")]
    with openai_server(Script(pieces)) as port, client(whole_host("m", port)) as asking:
        answer = asking.generate("m", messages=CHAT)
    assert (answer.reasoning, answer.finish_reason) == ("I add.", "tool_calls")
    assert [(call.name, call.arguments, call.id) for call in answer.tool_calls] == [("add", {"a": 1}, "call_9")]


def test_a_server_that_sends_more_calls_than_were_asked_for_has_one_in_the_answer() -> None:
    parts = [{"index": at, "id": f"c{at}", "function": {"name": "add", "arguments": "{}"}} for at in range(2)]
    script = Script([said("", tool_calls=parts), *ended("tool_calls")])
    with openai_server(script) as port, client(whole_host("m", port)) as asking:
        tools = [{"name": "add"}]
        one = asking.generate("m", messages=CHAT, tools=tools, parallel_tool_calls=False)
        both = asking.generate("m", messages=CHAT, tools=tools)
    assert [call.id for call in one.tool_calls] == ["c0"] and "2 tool calls" in one.warnings[0]
    assert [call.id for call in both.tool_calls] == ["c0", "c1"] and not both.warnings
    assert [asked[2].get("parallel_tool_calls") for asked in script.asked if asked[2]] == [False, None]


def test_the_fleets_token_never_leaves_for_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("sk-from-file\n")
    monkeypatch.setenv("OTHER_KEY", "sk-from-variable")
    sent = []
    for options in ({}, {"key_file": str(tmp_path / "key")}, {"key_variable": "OTHER_KEY"}):
        script = Script([said("x"), *ended()])
        with openai_server(script) as port, client(whole_host("m", port, **options)) as asking:
            asking.connect()
            asking.generate("m", "hi")
        sent.append({headers.get("Authorization") for _, headers, _ in script.asked})
    assert sent == [{None}, {"Bearer sk-from-file"}, {"Bearer sk-from-variable"}]


def test_a_key_that_cannot_be_read_is_one_line_that_names_its_file() -> None:
    with client(whole_host("m", 9, key_file="/nowhere/key")) as asking, pytest.raises(DisaggError) as caught:
        asking.generate("m", "hi")
    assert caught.value.message == "cannot read the key of ollama from /nowhere/key: No such file or directory"


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (Script(status=401, content=b'{"error": {"message": "bad key"}}'), ServerRefused, "refuses its key"),
        (Script(status=404, content=b'{"error": "not found"}', models=("a", "b")), ServerRefused, "it has a, b"),
        (Script(status=400, content=b'{"detail": "bad field"}'), RequestError, "refuses the request: bad field"),
        (Script(status=400, content=b'{"error": {"message": "context length"}}'), ContextLengthExceeded, "context"),
        (Script(status=500, content=b'{"error": {"message": "CUDA"}}'), DisaggError, "failed: HTTP 500: CUDA"),
        (Script(status=302, headers={"Location": "/login"}), ServerRefused, "redirects to /login"),
        (Script(content=b"<html>"), ServerRefused, "does not answer as an OpenAI-compatible server"),
        (Script([b"data: {\n\n"]), DisaggError, "unreadable piece"),
        (Script([{"error": {"message": "no memory"}}]), DisaggError, "ollama failed: no memory"),
        (Script([*ended()[1:]]), ServerUnavailable, "before the answer was complete"),
        (Script([], cut=True), ServerUnavailable, "lost the connection|not answer as"),
    ],
)
def test_what_a_server_may_answer_instead_of_an_answer_is_one_line(
    script: Script, kind: type[DisaggError], words: str
) -> None:
    with openai_server(script) as port, client(whole_host("m", port)) as asking, pytest.raises(kind, match=words) as it:
        asking.generate("m", messages=CHAT, timeout=4)
    assert "\n" not in str(it.value)


def test_a_cut_answer_is_an_error_with_what_had_arrived_and_is_not_asked_for_again() -> None:
    script = Script([said("Hel"), said("lo")], cut=True)
    with openai_server(script) as port, client(whole_host("m", port)) as asking, pytest.raises(DisaggError) as caught:
        asking.generate("m", messages=CHAT, timeout=5)
    assert caught.value.partial is not None and caught.value.partial.text == "Hello"
    assert len([path for path, *_ in script.asked if path != "/v1/models"]) == 1


def test_other_suspects_go_on_when_such_a_server_answers_one_and_not_when_it_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone_on, before_its_end = threading.Event(), list[bool]()
    monkeypatch.setattr(Suspicion, "end_turn", lambda suspicion: gone_on.set())

    def pieces() -> Iterator[dict[str, Any]]:
        yield said("Hel", role="assistant")
        before_its_end.append(gone_on.wait(10))
        yield from (said("lo"), *ended())

    with openai_server(Script(cast(Any, pieces()))) as port, client(whole_host("m", port)) as asking:
        assert asking.generate("m", messages=CHAT, timeout=30).text == "Hello"
    assert before_its_end == [True]


def test_a_server_that_does_not_run_is_reported_at_once() -> None:
    with client(whole_host("m", 9)) as asking, pytest.raises(ServerNotRunning, match="no server answers"):
        asking.generate("m", "hi", timeout=5)


def test_token_ids_cannot_be_sent_and_tokens_cannot_be_counted() -> None:
    with client(whole_host("m", 9)) as asking, pytest.raises(CapabilityMissing):
        asking.generate("m", tokens=[1, 2], timeout=5)


def test_no_tls_is_one_line(tmp_path: Path) -> None:
    with openai_server(Script()) as port:
        engine = EngineOptions("openai", url=f"https://127.0.0.1:{port}", model="x")
        host = Host("cloud", "127.0.0.1", ("whole",), "m", engine, port)
        with client(host) as asking, pytest.raises(ServerRefused, match="no TLS connection to cloud"):
            asking.generate("m", "hi", timeout=3)


def test_a_whole_host_is_asked_when_no_decode_host_answers() -> None:
    decode = Host("mac", "127.0.0.1", ("decode",), "m", EngineOptions("mlx"), 9)
    script = Script([said("ok"), *ended()])
    with openai_server(script) as port:
        both = with_whole(fleet(decode), whole_host("m", port))
        with Client(both, token="the fleet's own token") as asking:
            answer = asking.generate("m", messages=CHAT, timeout=5)
    assert answer.text == "ok"
    assert answer.warnings == (
        "no server answers at https://127.0.0.1:9 (mac): asking ollama",
        "Using fallback mode - slower performance: no decode host is up, asking ollama to answer alone",
    )


async def test_a_fleet_of_which_nothing_runs_is_one_error_without_notes() -> None:
    hosts = (
        Host("mac", "127.0.0.1", ("decode",), "m", EngineOptions("mlx"), 9),
        Host("dgx", "127.0.0.1", ("prefill",), "m", EngineOptions("transformers"), 10),
    )
    notes = []
    async with AsyncClient(fleet(*hosts), token="t") as asking:
        with pytest.raises(ServerUnavailable, match="no server answers") as raised:
            async for chunk in asking.stream("m", messages=CHAT, timeout=60):
                notes.append(chunk.note)
    assert notes == [] and raised.value.hint == "the fleet is not started: run `disagg start`"


def test_alone_whole_asks_the_whole_host_though_a_decode_host_is_up() -> None:
    decode = Host("mac", "127.0.0.1", ("decode",), "m", EngineOptions("mlx"), 9)
    with Client(with_whole(fleet(decode), whole_host("m", 10)), token="t") as asking:
        ranking = asking.explain("m", "hi", alone="whole")
    assert [choice.host.name for choice in ranking.whole] == ["ollama"] and ranking.decode == ()


def test_an_answer_without_a_token_has_the_times_of_its_end() -> None:
    with openai_server(Script([said(""), *ended("stop", 7, 0)])) as port, client(whole_host("m", port)) as asking:
        answer = asking.generate("m", messages=CHAT)
    metrics = answer.metrics
    assert answer.text == "" and 0 < metrics.ttft == metrics.total_time < 600 and metrics.decode_time == 0
    assert min(asdict(metrics.ttft_parts).values()) >= 0


def test_a_fleet_of_whole_hosts_only_needs_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    decode = Host("mac", "127.0.0.1", ("decode",), "m", EngineOptions("mlx"), 9)
    with openai_server(Script([said("ok"), *ended()])) as port:
        alone = fleet(whole_host("m", port))
        with Client(alone) as asking:
            assert asking.generate("m", messages=CHAT).text == "ok"
        with pytest.raises(ConfigError, match="there is no fleet token"):
            Client(replace(alone, hosts={**alone.hosts, "mac": decode}))


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    ("response", "options"),
    [
        (b"HTTP/1.1 200 X\r\n\r\n{}", {"key_file": "/nowhere/key"}),
        (b"SSH-2.0-OpenSSH_9.6\r\n", {}),
    ],
    ids=["a key that cannot be read", "another kind of server"],
)
async def test_a_host_that_a_request_finds_out_about_is_not_down(response: bytes, options: dict[str, str]) -> None:
    async with FixedHost(response).listening(tls=False) as port:
        host = whole_host("m", port, **options)
        async with AsyncClient(fleet(host), token="t") as asking:
            with asking.watching():
                await asyncio.sleep(3 * background.WHOLE_INTERVAL_S)
            assert asking.view.of(host.name).reachable == "up"
            with pytest.raises(DisaggError, match=r"cannot read the key|does not answer as an OpenAI"):
                await asking.generate("m", "hi")


@pytest.mark.usefixtures("virtual_time")
async def test_a_host_is_asked_for_its_models_as_often_as_is_stated() -> None:
    host = FixedHost(b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\n{}")
    async with host.listening(tls=False) as port, AsyncClient(fleet(whole_host("m", port)), token="t") as asking:
        with asking.watching():
            await asyncio.sleep(6 * background.WHOLE_INTERVAL_S)
    assert 6 <= len(host.received) <= 7


@pytest.mark.usefixtures("virtual_time")
async def test_a_request_asks_the_host_itself_before_it_fails_because_it_seems_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = "".join(f"data: {json.dumps(one)}\n\n" for one in [said("ok"), *ended()])
    answers = FixedHost(f"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\n\r\n{pieces}".encode())
    async with answers.listening(tls=False) as port, AsyncClient(fleet(whole_host("m", port)), token="t") as asking:
        monkeypatch.setattr(asking._driver.refresher, "due", lambda _: [])  # the view is out of date
        asking.view.hosts["ollama"] = UNKNOWN.missed().missed()
        assert (await asking.generate("m", messages=CHAT)).text == "ok"
