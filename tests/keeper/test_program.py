"""`python -m disagg.keeper` with two tiny models and memory for one: real processes, from first to last."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from disagg.config import load
from disagg.errors import DisaggError
from disagg.inference.client import Client
from disagg.token import MEMORY_FOLDER_VARIABLE, TOKEN_FILE_VARIABLE
from tests import tiny_models
from tests.deadlines import wait_until
from tests.fleet.services.test_supervise import Folder
from tests.fleets import TOKEN, RunningFleet, running, write_kept_hosts
from tests.keeper.keeping import alive, write
from tests.ports import free_ports
from tests.preloaded import AVAILABLE

pytestmark = pytest.mark.slow
HOST = "decode-1"
MAX_KEEPER_BYTES = 60_000_000
ROOM_FOR_ONE = 2 << 30


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_models.make(name, folder / name) for name in ("llama", "qwen3")}


@contextmanager
def kept(folder: Path, models: dict[str, Path], *, forks: bool = AVAILABLE, **keys: Any) -> Iterator[RunningFleet]:
    """forks: see RunningFleet."""
    path = write_kept_hosts(folder, models, prefill=0, decode=1, **{"memory_bytes": ROOM_FOR_ONE, **keys})
    with running(path, forks=forks) as fleet:
        yield fleet


def events(fleet: RunningFleet, model: str) -> list[dict[str, Any]]:
    """Of a load, until it ends."""
    with fleet.http(HOST) as http, http.stream("POST", "/models/load", json={"model": model}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def stated(fleet: RunningFleet) -> dict[str, dict[str, Any]]:
    with fleet.http(HOST) as http:
        return {one["model"]: one for one in http.get("/load").json()["models"]}


def generate(fleet: RunningFleet, model: str, max_tokens: int = 8) -> list[str]:
    """The ids of the answer's tokens, from the model's own process."""
    port = stated(fleet)[model]["port"]
    with httpx.Client(verify=False, timeout=60, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        body = {"model": model, "prompt": "def f(x):", "sampling": {"max_tokens": max_tokens, "ignore_eos": True}}
        answer = http.post(f"https://127.0.0.1:{port}/generate", json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        return re.findall(r'"id":(\d+)', answer.text)


def test_two_models_take_turns_in_the_memory_of_one(tmp_path: Path, models: dict[str, Path]) -> None:
    with kept(tmp_path, models) as fleet:
        keeper = psutil.Process(fleet.processes[HOST].pid)
        assert {name: one["state"] for name, one in stated(fleet).items()} == {"llama": "asleep", "qwen3": "asleep"}
        first = events(fleet, "llama")
        assert [one["state"] for one in first][-2:] == ["loading", "ready"]
        answer = generate(fleet, "llama")
        assert events(fleet, "qwen3")[-1]["state"] == "ready"
        generate(fleet, "qwen3")
        state = stated(fleet)
        assert (state["llama"]["state"], state["llama"]["evictions"]) == ("asleep", {"room": 1})
        assert sum(one.memory_info().rss for one in keeper.children(recursive=True)) <= ROOM_FOR_ONE
        assert events(fleet, "llama")[-1]["port"] == first[-1]["port"]
        assert generate(fleet, "llama") == answer and len(answer) == 8
        with fleet.http(HOST) as http:
            done = http.post("/models/unload", json={"model": "llama"})
            assert {one["state"] for one in done.json()["models"]} == {"asleep"}
            counters = http.get("/status").json()["counters"]
        assert counters["completed"] == 3
        assert keeper.children(recursive=True) == []


def test_a_model_that_is_unloaded_by_force_ends_the_answers_that_it_gives(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    with kept(tmp_path, {"llama": models["llama"]}) as fleet, fleet.http(HOST) as http:
        events(fleet, "llama")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(generate, fleet, "llama", 4000)
            wait_until(lambda: stated(fleet)["llama"]["running"] == 1, what="the answer to begin")
            refused = http.post("/models/unload", json={"model": "llama"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (httpx.codes.CONFLICT, "ModelBusy")
            done = http.post("/models/unload", json={"model": "llama", "force": True})
            assert done.json()["models"][0]["state"] == "asleep"
            assert len(answer.result()) < 4000


def test_bad_input_is_one_clear_answer_each(tmp_path: Path, models: dict[str, Path]) -> None:
    with kept(tmp_path, models, memory_bytes=1 << 20) as fleet, fleet.http(HOST) as http:
        with fleet.http(HOST, token="") as stranger:
            assert stranger.get("/load").status_code == httpx.codes.UNAUTHORIZED
            assert stranger.get("/health").json() == {"status": "ok"}
        cases: list[tuple[str, dict[str, Any], int, str]] = [
            ("load", {"model": "none"}, 404, "decode-1 has no model 'none': it has llama, qwen3"),
            ("load", {"model": "llama"}, 500, "llama needs"),
            ("load", {"model": "llama", "keep_alive_s": "5m"}, 400, "bad request body: keep_alive_s: expected float"),
            ("load", {"model": "llama", "keep_alive_s": -2}, 400, "keep_alive_s: expected float >= -1.0"),
            ("load", {"name": "llama"}, 400, "unknown field"),
            ("unload", {}, 400, "model: missing"),
            ("pin", {"model": "llama", "pinned": 3}, 400, "pinned: expected bool"),
            ("keep", {"model": "none", "keep_alive_s": 3}, 404, "no model 'none'"),
            ("delete", {"model": "llama"}, 500, "is a folder of your own"),
        ]
        for path, body, status, message in cases:
            answer = http.post(f"/models/{path}", json=body)
            assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text
        assert http.post("/models/burn", json={}).status_code == httpx.codes.NOT_FOUND
        assert '"status":"success"' in http.post("/models/pull", json={"model": "llama"}).text, "its folder is there"


def test_a_keeper_that_is_killed_leaves_no_process_and_the_next_one_starts_with_none(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    with kept(tmp_path, models, memory_bytes=2 * ROOM_FOR_ONE, preload=["llama", "qwen3"]) as fleet:
        wait_until(lambda: stated(fleet)["llama"]["state"] == "ready", what="the first model")
        wait_until(lambda: stated(fleet)["qwen3"]["pid"], what="the second one to load")
        before = stated(fleet)
        pids = [one["pid"] for one in before.values()]
        os.kill(pids[0], signal.SIGSTOP)  # frozen as it is, it ends with its keeper
        process = fleet.processes.pop(HOST)
        process.kill()
        process.wait(60)
        wait_until(lambda: not any(map(alive, pids)), what="the end of the processes")
        fleet.start(fleet.fleet.hosts[HOST])
        fleet.wait_ready(fleet.fleet.hosts[HOST])
        wait_until(lambda: {one["state"] for one in stated(fleet).values()} == {"ready"}, what="both models")
        after = stated(fleet)
        assert {name: one["port"] for name, one in after.items()} == {name: one["port"] for name, one in before.items()}
        assert len(psutil.Process(fleet.processes[HOST].pid).children()) == 2


def test_a_changed_list_is_read_while_it_runs_and_an_answer_outlives_a_stop(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    with kept(tmp_path, {"llama": models["llama"], "other": models["qwen3"]}, forks=False) as fleet:
        events(fleet, "llama")
        pid = stated(fleet)["llama"]["pid"]
        path = fleet.fleet.path
        text = path.read_text()
        path.write_text("models = 1\n")
        wait_until(lambda: "models_not_changed" in fleet.log(HOST), what="the bad file to be reported")
        path.write_text(text.replace('models = ["llama", "other"]', 'models = ["llama"]'))
        wait_until(lambda: set(stated(fleet)) == {"llama"}, what="the change")
        assert stated(fleet)["llama"]["pid"] == pid
        assert load(path).hosts[HOST].models == ("llama",)
        assert len(generate(fleet, "llama")) == 8
        assert psutil.Process(fleet.processes[HOST].pid).memory_info().rss < MAX_KEEPER_BYTES
        assert fleet.stop(HOST) == 0
        assert not alive(pid)


SOON_NOTIFIED = """\
import sys
import disagg.keeper.__main__ as program

program.NOTIFIED_S, program.NOTIFY_S = 2, 0.2
sys.exit(program.main())
"""
"""A keeper that its supervisor ends after 2 s without a notice of it, in place of 90."""


def test_a_frozen_keeper_is_ended_by_its_supervisor_and_requests_do_not_wait_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor is stopped, too, until the requests have been answered."""
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    monkeypatch.setenv(MEMORY_FOLDER_VARIABLE, str(tmp_path / "memory"))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    path = write(tmp_path, ["ready", "asleep"])
    path.write_text(path.read_text().replace("port = 9\n", f"port = {free_ports(1)[0]}\n"))
    folder = Folder(tmp_path)
    folder.change("TRACES_S = 3.0", "TRACES_S = 0.2")
    keeper = [sys.executable, "-c", SOON_NOTIFIED, "--config", str(path), "--host", "h", "--state", str(tmp_path / "s")]
    folder.serve(f"exec {shlex.join(keeper)}")
    supervisor = folder.call("start")
    try:
        wait_until(lambda: '"keeping"' in folder.log(), what="the keeper")
        with Client(load(path), token=TOKEN) as client:
            client.generate("ready", "hi", max_tokens=2)
            pids = [supervisor["child"], *(one.pid for one in psutil.Process(supervisor["child"]).children())]
            for frozen in (supervisor["pid"], supervisor["child"]):
                os.kill(frozen, signal.SIGSTOP)
            client.generate("ready", "hi", max_tokens=2)
            with pytest.raises(DisaggError, match=r"asleep was still being loaded after 1 s|did not answer in time"):
                client.generate("asleep", "hi", max_tokens=2, timeout=1)
            os.kill(supervisor["pid"], signal.SIGCONT)
            wait_until(lambda: folder.log().count('"keeping"') == 2, what="the next keeper")
            assert len(pids) == 2 and not any(map(alive, pids))
            client.generate("asleep", "hi", max_tokens=2)
        hangs, ended = (json.loads(line) for line in folder.log().splitlines() if '"server_' in line)
        assert hangs["message"] == "it hung as a whole: no notice of it for 2 s"
        assert (ended["exit"], ended["restarts"]) == (-signal.SIGKILL, 1)
    finally:
        os.kill(supervisor["pid"], signal.SIGCONT)
        folder.call("stop")
