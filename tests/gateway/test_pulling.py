"""What callers ask of hosts with several models: loads and unloads in the forms of Ollama and LM Studio, pulls,
deletes, and who may."""

from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from disagg.errors import FleetError, ModelBusy, ModelError
from disagg.gateway.clients.keys import KeyFile
from tests.deadlines import LONG_S
from tests.gateway.fake_client import FakeClient
from tests.gateway.kept_models import CHANGES, asked, fails, gateway, keeping

ASLEEP: dict[str, Any] = {"m": {"state": "asleep"}}
READY: dict[str, Any] = {"m": {"state": "ready"}}
BUSY = {**CHANGES, "models/unload": fails(ModelBusy("m is busy: 2 requests use it", "wait for them"))}
BOTH = ("mac", "dgx")


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
async def test_without_a_prompt_a_model_is_loaded_on_a_host_of_each_role_for_as_long_as_is_asked(path: str) -> None:
    async with keeping(ASLEEP) as (client, hosts), gateway(client) as http:
        answer = await http.post(path, json={"model": "m-alias", "keep_alive": "5m", "stream": False})
        assert (answer.status_code, answer.json()["done_reason"]) == (200, "load"), answer.text
        for name in BOTH:
            assert asked(hosts[name]) == [("load", {"model": "m", "keep_alive_s": 300})]
        for_ever = await http.post(path, json={"model": "m", "keep_alive": -1})
        assert for_ever.json()["done_reason"] == "load"
        assert asked(hosts["mac"])[-1] == ("load", {"model": "m", "keep_alive_s": -1})


async def test_a_keep_alive_of_0_without_a_prompt_unloads() -> None:
    async with keeping(READY) as (client, hosts), gateway(client) as http:
        answer = await http.post("/api/generate", json={"model": "m", "keep_alive": 0})
        assert answer.json()["done_reason"] == "unload"
        assert [asked(hosts[name]) for name in BOTH] == [[("unload", {"model": "m", "force": False})]] * 2


async def test_a_busy_model_goes_by_ollama_s_call_once_it_has_answered() -> None:
    async with keeping(READY, BUSY) as (client, hosts), gateway(client) as http:
        answer = await http.post("/api/generate", json={"model": "m", "prompt": "", "keep_alive": 0})
        assert (answer.status_code, answer.json()["done_reason"]) == (200, "unload"), answer.text
        async with asyncio.timeout(LONG_S):
            while not all(asked(hosts[name])[-1] == ("keep", {"model": "m", "keep_alive_s": 0}) for name in BOTH):
                await asyncio.sleep(0)


async def test_a_busy_model_is_not_unloaded_by_other_calls_and_the_caller_is_told() -> None:
    async with keeping(READY, BUSY) as (client, _), gateway(client) as http:
        answer = await http.post("/api/v1/models/unload", json={"instance_id": "m"})
        deleted = await http.request("DELETE", "/api/delete", json={"model": "m"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_busy")
    assert "2 requests use it" in answer.json()["error"]["message"]
    assert deleted.status_code == 409 and "2 requests use it" in deleted.json()["error"]


async def test_a_model_that_cannot_be_loaded_is_refused_with_its_host_s_reason() -> None:
    failing = {
        **CHANGES,
        "models/load": fails(ModelError("mac cannot load m: it takes 9 GiB of 4", "raise memory_bytes")),
    }
    async with keeping(ASLEEP, failing) as (client, _), gateway(client) as http:
        studio = await http.post("/api/v1/models/load", json={"model": "m"})
        ollama = await http.post("/api/generate", json={"model": "m"})
    assert (studio.status_code, studio.json()["error"]["code"]) == (503, "model_not_loaded")
    assert ollama.status_code == 503 and "9 GiB" in ollama.json()["error"]


async def test_lm_studio_loads_and_unloads_an_instance_named_as_the_model() -> None:
    async with keeping(ASLEEP) as (client, hosts), gateway(client) as http:
        loaded = (await http.post("/api/v1/models/load", json={"model": "m-alias", "echo_load_config": True})).json()
        unloaded = (await http.post("/api/v1/models/unload", json={"instance_id": "m"})).json()
        longer = await http.post("/api/v1/models/load", json={"model": "m", "context_length": 5000})
        single = (await http.post("/api/v1/models/load", json={"model": "single"})).json()
        assert [word for word, _ in asked(hosts["dgx"])] == ["load", "unload"]
    assert (loaded["instance_id"], loaded["status"], loaded["load_config"]) == ("m", "loaded", {"context_length": 4096})
    assert unloaded == {"instance_id": "m"} and single["status"] == "loaded"
    assert longer.status_code == 400 and longer.json()["error"]["param"] == "context_length"


@pytest.mark.parametrize(("given", "told"), [("10m", 600), (-1, -1), (0, 0)])
async def test_after_an_answer_the_hosts_of_its_model_are_told_how_long_it_stays(given: Any, told: float) -> None:
    async with keeping(READY) as (client, hosts):
        answering: Any = FakeClient("one ")
        answering.fleet, answering.view, answering.connections = client.fleet, client.view, client.connections
        async with gateway(answering) as http:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            without = await http.post("/v1/chat/completions", json=body)
            answer = await http.post("/v1/chat/completions", json={**body, "keep_alive": given})
            async with asyncio.timeout(LONG_S):
                while not all(asked(hosts[name]) for name in BOTH):
                    await asyncio.sleep(0.002)
        assert without.status_code == answer.status_code == 200
        assert [asked(hosts[name]) for name in BOTH] == [[("keep", {"model": "m", "keep_alive_s": told})]] * 2


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/generate", {"model": "single", "keep_alive": 0}),
        ("POST", "/api/v1/models/unload", {"instance_id": "single"}),
        ("POST", "/api/pull", {"model": "single"}),
        ("DELETE", "/api/delete", {"model": "single"}),
    ],
)
async def test_a_model_of_a_host_with_one_is_always_loaded_and_its_files_are_not_changed(
    method: str, path: str, body: dict[str, Any]
) -> None:
    async with keeping(READY) as (client, _), gateway(client) as http:
        answer = await http.request(method, path, json=body)
    assert answer.status_code == 400 and "old always has it" in answer.text and "models = " in answer.text


async def test_a_pull_says_how_far_each_host_is_and_ends_with_success() -> None:
    async with keeping(ASLEEP) as (client, hosts), gateway(client) as http:
        streamed = await http.post("/api/pull", json={"model": "m"})
        whole = await http.post("/api/pull", json={"name": "m", "stream": False})
        assert asked(hosts["mac"]) == [("pull", {"model": "m"})] * 2
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert (lines[0], lines[-1]) == ({"status": "pulling manifest"}, {"status": "success"})
    far = [one for one in lines if one.get("completed") == 100]
    assert {one["status"] for one in far} == {f"{name}: pulling model.safetensors" for name in BOTH}
    assert len({one["digest"] for one in far}) == 2, "clients draw a line for each"
    assert whole.json() == {"status": "success"}


async def test_a_pull_that_fails_on_one_host_goes_on_on_the_others_and_ends_with_the_reason() -> None:
    failing = {**CHANGES, "models/pull": fails(FleetError("mac: the disk is full", "free 3 GiB"))}
    async with keeping(ASLEEP, failing) as (client, _), gateway(client) as http:
        streamed = await http.post("/api/pull", json={"model": "m"})
        whole = await http.post("/api/pull", json={"model": "m", "stream": False})
    assert "the disk is full" in json.loads(streamed.text.splitlines()[-1])["error"]
    assert whole.status_code >= 500 and "the disk is full" in whole.json()["error"]


async def test_a_model_that_hosts_toml_does_not_name_is_refused_with_the_lines_to_add() -> None:
    async with keeping(ASLEEP) as (client, _), gateway(client) as http:
        answer = await http.post("/api/pull", json={"model": "hf.co/owner/new-7b"})
    error = answer.json()["error"]
    assert answer.status_code == 404 and '[models."hf.co/owner/new-7b"]' in error and "\n" not in error
    assert 'simulated = "owner/new-7b"' in error and "[hosts.mac] and [hosts.dgx]" in error and "disagg deploy" in error


async def test_files_are_deleted_where_they_are_and_a_model_without_any_is_not_found() -> None:
    async with (
        keeping({"m": {"state": "ready"}, "gone": {"state": "absent"}}) as (client, hosts),
        gateway(client) as http,
    ):
        there = await http.request("DELETE", "/api/delete", json={"model": "m"})
        absent = await http.request("DELETE", "/api/delete", json={"name": "gone"})
        for name in BOTH:
            assert asked(hosts[name]) == [("unload", {"model": "m", "force": False}), ("delete", {"model": "m"})]
    assert there.status_code == 200 and absent.status_code == 404


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/show"), ("POST", "/api/pull"), ("DELETE", "/api/delete")])
async def test_a_body_that_names_no_model_is_told_so(method: str, path: str) -> None:
    async with keeping(READY) as (client, _), gateway(client) as http:
        answer = await http.request(method, path, json={"stream": False} if path == "/api/pull" else {})
    assert (answer.status_code, answer.json()["error"]) == (400, "model: missing")


async def test_the_lines_to_add_for_a_model_are_toml_whatever_its_name_is() -> None:
    async with keeping(READY) as (client, _), gateway(client) as http:
        answer = await http.post("/api/pull", json={"model": 'a"]\nb'})
    lines = answer.json()["error"].partition("(add ")[2].partition("; then")[0].split("; ")
    assert list(tomllib.loads("\n".join(lines))["models"]) == ['a"]\nb'], answer.text


async def test_another_name_of_a_model_is_not_made_by_copying() -> None:
    async with keeping(READY) as (client, _), gateway(client) as http:
        answer = await http.post("/api/copy", json={"source": "m", "destination": "mine"})
    assert answer.status_code == 400 and "`aliases`" in answer.json()["error"] and "mine" in answer.json()["error"]


async def test_only_an_admin_s_key_changes_files_and_a_key_without_loads_gets_what_is_loaded(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    secrets = {name: file.add(name, **grants) for name, grants in KEYS.items()}
    found: dict[str, list[int]] = {}
    for name, secret in secrets.items():
        async with keeping(ASLEEP) as (client, _), gateway(client, file.path, secret) as http:
            answers = [
                await http.post("/api/pull", json={"model": "m", "stream": False}),
                await http.request("DELETE", "/api/delete", json={"model": "m"}),
                await http.post("/api/generate", json={"model": "m"}),
                await http.post("/api/v1/models/load", json={"model": "m"}),
            ]
            found[name] = [answer.status_code for answer in answers]
    assert found == {"ops": [200, 200, 200, 200], "user": [403, 403, 200, 200], "guest": [403, 403, 403, 403]}


async def test_a_key_without_loads_unloads_nothing(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    async with keeping(READY) as (client, hosts), gateway(client, file.path, file.add("guest", load=False)) as http:
        answer = await http.post("/api/generate", json={"model": "m", "keep_alive": 0})
        assert (answer.status_code, "may not unload m" in answer.text) == (403, True)
        assert (await http.post("/api/generate", json={"model": "m"})).status_code == 200, "it is loaded"
        assert all("unload" not in [word for word, _ in asked(hosts[name])] for name in BOTH)


KEYS: dict[str, Any] = {"ops": {"admin": True}, "user": {}, "guest": {"load": False}}
