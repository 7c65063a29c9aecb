"""Models on demand through the gateway, with real keepers, a hub on this machine and the official ollama client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from disagg.config import load
from disagg.gateway.clients.keys import KeyFile
from disagg.inference.http import keeper_calls
from disagg.inference.http.connections import Connections
from disagg.token import TOKEN_FILE_VARIABLE, Tokens
from tests import hub, tiny_models
from tests.cli.commandline import run
from tests.deadlines import LONG_S, wait_until
from tests.fleets import TOKEN, running, write_kept_hosts
from tests.served_gateway import ServedGateway, served_gateway

pytestmark = pytest.mark.slow

HUB_ID = "someone/tiny"
CHAT: list[Any] = [{"role": "user", "content": "def add(a, b):"}]
OPTIONS = {"temperature": 0, "num_predict": 4}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    """A gateway in front of one host per role, that have a model of the hub and one of a folder each, and room for a
    third."""
    folder = tmp_path_factory.mktemp("on-demand")
    checkpoint = tiny_models.make("llama", folder / "llama")
    sources = {"pulled": Path(HUB_ID), "llama": checkpoint, "added": checkpoint}
    path = write_kept_hosts(folder, sources, prefill=1, decode=1)
    (folder / "longer.toml").write_text(whole := path.read_text())
    path.write_text(re.sub(r'\[models\."added"].*?(?=\[hosts)', "", whole, flags=re.DOTALL).replace(', "added"', ""))
    with pytest.MonkeyPatch.context() as patch, hub.serving(HUB_ID, checkpoint) as url:
        for name, value in {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "0"}.items():
            patch.setenv(name, value)
        with running(path), served_gateway(path) as gateway:
            yield gateway


@pytest.fixture
def client(served: ServedGateway) -> Iterator[ollama.Client]:
    with ollama.Client(host=served.url, trust_env=False) as client:
        yield client


def process_ids(path: Path, model: str) -> dict[str, int | None]:
    """Of the processes that have this model, by host."""

    async def read() -> dict[str, int | None]:
        async with Connections(Tokens(TOKEN)) as http:
            stated = {host.name: await keeper_calls.models(http, host) for host in load(path).hosts.values()}
        return {name: one.pid for name, models in stated.items() for one in models if one.model == model}

    return asyncio.run(read())


def running_models(client: ollama.Client) -> list[str | None]:
    return [one.model for one in client.ps().models]


def test_a_model_is_pulled_shown_loaded_kept_unloaded_and_deleted(client: ollama.Client) -> None:
    assert [one.model for one in client.list().models] == ["llama"], "what no host has is not listed"
    with pytest.raises(ollama.ResponseError, match=r"absent|weights|files"):
        client.chat("pulled", CHAT, options=OPTIONS)

    parts = list(client.pull("pulled", stream=True))
    assert (parts[0].status, parts[-1].status) == ("pulling manifest", "success")
    whole = [part for part in parts if part.total and part.completed == part.total]
    assert whole and all(part.digest for part in whole)
    assert client.pull("pulled").status == "success", "again: it is there"

    listed = {one.model: one.size for one in client.list().models}
    assert listed["pulled"] == listed["llama"] and int(listed["pulled"] or 0) > 100_000
    shown = client.show("pulled")
    assert shown.details is not None and shown.details.family == "llama" and shown.details.parameter_size
    assert shown.details.quantization_level == "float32" and "completion" in (shown.capabilities or [])

    assert running_models(client) == []
    answer = client.chat("pulled", CHAT, options=OPTIONS, keep_alive="10m")
    assert answer.eval_count == 4
    (loaded,) = client.ps().models
    assert loaded.model == "pulled" and int(loaded.size_vram or 0) > 0

    def left() -> timedelta:
        (one,) = client.ps().models
        gone: datetime = one.expires_at
        return gone - datetime.now(UTC)

    wait_until(lambda: timedelta(minutes=9) < left() < timedelta(minutes=11), what="an expiry in 10 min")
    assert client.generate("pulled", keep_alive=-1).done_reason == "load"
    assert left() > timedelta(days=365)
    assert client.generate("pulled", keep_alive=0).done_reason == "unload"
    assert running_models(client) == []

    assert client.delete("pulled").status == "success"
    assert [one.model for one in client.list().models] == ["llama"]
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("pulled")
    assert caught.value.status_code == 404


def test_a_keeper_finds_the_files_that_a_command_has_pulled_and_removes_them_for_another(
    served: ServedGateway, client: ollama.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = served.log.parent
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(folder / "token"))

    def models(*words: str) -> Any:
        code = run("--config", folder / "hosts.toml", "models", *words, "--json")
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    pulled = models("pull", "pulled")["hosts"]
    assert {one["result"] for one in pulled} <= {"downloaded", "there"} and len(pulled) == 2, pulled
    wait_until(lambda: "pulled" in [one.model for one in client.list().models], 2 * LONG_S, "the files to be found")
    assert set(models("rm", "pulled", "--yes")["removed"]) == {"prefill-1/pulled", "decode-1/pulled"}
    wait_until(lambda: [one.model for one in client.list().models] == ["llama"], what="the files are gone")


def test_what_hosts_toml_does_not_name_or_owns_is_not_changed(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r'\[models."qwen3:8b"\]') as caught:
        client.pull("qwen3:8b")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="folder of your own"):
        client.delete("llama")
    with pytest.raises(ollama.ResponseError, match="aliases"):
        client.copy("llama", "mine")
    with pytest.raises(ollama.ResponseError, match="keep_alive: not a length of time"):
        client.generate("llama", "x", keep_alive="soon")


def test_a_changed_list_is_read_while_requests_run_and_anything_else_that_changed_is_refused(
    served: ServedGateway,
) -> None:
    folder = served.log.parent
    path, longer = folder / "hosts.toml", (folder / "longer.toml").read_text()
    chat = {"messages": CHAT, "temperature": 0}
    with httpx.Client(base_url=served.url, timeout=120, trust_env=False) as http:

        def says(why: str) -> bool:
            return why in served.log.read_text()

        def listed() -> list[str]:
            return [one["id"] for one in http.get("/v1/models").json()["data"]]

        assert http.post("/v1/chat/completions", json={**chat, "model": "added"}).status_code == 404
        long = {**chat, "model": "llama", "max_tokens": 600, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=long) as answer:
            lines = answer.iter_lines()
            assert next(line for line in lines if line.startswith("data: "))
            before = process_ids(path, "llama")
            path.write_text(longer)
            wait_until(lambda: "added" in listed(), what="the gateway has read the list")
            done = http.post("/v1/chat/completions", json={**chat, "model": "added", "max_tokens": 4})
            assert done.status_code == 200 and done.json()["usage"]["completion_tokens"] == 4, done.text
            *_, last = [line for line in lines if line]
            assert last == "data: [DONE]"
        assert process_ids(path, "llama") == before and all(before.values()) and served.process.poll() is None

        for text, why in (
            ("[hosts", "models_not_changed"),
            (longer.replace("max_kv", "max_batch = 3, max_kv"), "more has changed"),
        ):
            path.write_text(text)
            wait_until(partial(says, why), what="it says why the file is not used")
            assert listed() == ["pulled", "llama", "added"]
        path.write_text(longer)


def test_a_key_that_may_not_load_gets_what_others_have_loaded_until_an_answer_is_the_last(
    served: ServedGateway,
) -> None:
    """From then on the gateway asks everybody for a key."""
    file = KeyFile(served.log.parent / "keys.json")
    guest, ops = ({"Authorization": f"Bearer {file.add(name, load=name == 'ops')}"} for name in ("guest", "ops"))
    chat = {"model": "llama", "messages": CHAT, "max_tokens": 2}
    with httpx.Client(base_url=served.url, timeout=120, trust_env=False, headers=ops) as http:

        def ask(headers: dict[str, str], **more: Any) -> httpx.Response:
            return http.post("/v1/chat/completions", json=chat | more, headers=headers)

        def state() -> str:
            return str(http.get("/v1/models/llama").json()["state"])

        def unloaded() -> bool:
            http.post("/api/generate", json={"model": "llama", "keep_alive": 0})  # another test may be loading it
            return state() == "asleep"

        wait_until(unloaded, what="it is unloaded")
        refused = ask(guest)
        assert refused.status_code == 403 and "may not load llama" in refused.json()["error"]["message"]

        loaded = http.post("/api/v1/models/load", json={"model": "llama"}).json()
        assert loaded["status"] == "loaded" and loaded["load_time_seconds"] > 0
        assert state() == "ready"
        listed = {one["key"]: one["loaded_instances"] for one in http.get("/api/v1/models").json()["models"]}
        assert [one["id"] for one in listed["llama"]] == ["llama"]
        assert (
            'disagg_model_loaded{host="decode-1/llama",model_name="llama",role="decode"} 1.0'
            in http.get("/metrics").text
        )
        assert ask(guest).status_code == 200

        assert ask(ops, keep_alive=0).status_code == 200
        wait_until(lambda: state() == "asleep", what="it is unloaded after that answer")
        labels = 'host="decode-1/llama",model_name="llama",reason="asked",role="decode"'
        assert re.search(f"disagg_model_evictions_total{{{labels}}} [1-9]", http.get("/metrics").text)
