"""How a server starts, fails to start, and ends."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from pathlib import Path

import httpx
import pytest

from disagg.config import load
from disagg.errors import ServerUnavailable
from disagg.inference.types import Chunk
from tests import tiny_models
from tests.deadlines import wait_until
from tests.fleets import TOKEN, RunningFleet, running, write_hosts

END_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("llama", tmp_path_factory.mktemp("lifecycle") / "model")


def failed_start(path: Path, host: str) -> tuple[int, dict[str, str]]:
    """Start a server that cannot start; its exit code and the last line of its log."""
    (path.parent / "token").write_text(TOKEN)
    fleet = RunningFleet(load(path), path.parent)
    fleet.start(fleet.fleet.hosts[host])
    code = fleet.processes[host].wait(END_S)
    lines = fleet.log(host).splitlines()
    assert not any("Traceback" in line for line in lines), fleet.log(host)
    return code, json.loads(lines[-1])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_port_in_use_is_named_before_the_model_loads(tmp_path: Path, model: Path, role: str) -> None:
    path = write_hosts(tmp_path, {"m": model})
    host = load(path).hosts[f"m-{role}"]
    with socket.create_server((host.address, host.port)):
        code, error = failed_start(path, host.name)
    assert code == 1
    assert error["code"] == "PortInUse" and str(host.port) in error["message"] and error["hint"]


def test_a_kv_port_in_use_is_named_too(tmp_path: Path, model: Path) -> None:
    path = write_hosts(tmp_path, {"m": model})
    host = load(path).hosts["m-decode"]
    assert host.kv_port is not None
    with socket.create_server((host.address, host.kv_port)):
        code, error = failed_start(path, host.name)
    assert code == 1
    assert error["code"] == "PortInUse" and str(host.kv_port) in error["message"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("damage", ["no folder", "no weights", "truncated weights", "no tokenizer"])
def test_a_damaged_model_is_one_clear_error(tmp_path: Path, model: Path, role: str, damage: str) -> None:
    broken = tmp_path / "broken"
    if damage != "no folder":
        shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    if damage == "no weights":
        weights.unlink()
    elif damage == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "no tokenizer":
        (broken / "tokenizer.json").unlink()
    code, error = failed_start(write_hosts(tmp_path, {"m": broken}), f"m-{role}")
    assert code == 3
    assert error["code"] == "ModelError" and str(broken) in error["message"] and error["hint"]


def test_a_host_that_hosts_toml_does_not_name_lists_those_there_are(tmp_path: Path, model: Path) -> None:
    other = load(write_hosts(tmp_path, {"other": model})).hosts["other-decode"]
    path = write_hosts(tmp_path, {"m": model})
    (tmp_path / "token").write_text(TOKEN)
    fleet = RunningFleet(load(path), tmp_path)
    fleet.start(other)
    process = fleet.processes["other-decode"]
    assert process.wait(END_S) == 2
    assert "m-prefill, m-decode" in fleet.log("other-decode")


def test_sigterm_lets_a_running_answer_finish_and_refuses_new_ones(tmp_path: Path, model: Path) -> None:
    with (
        running(write_hosts(tmp_path, {"m": model})) as fleet,
        fleet.client() as client,
        fleet.http("m-decode") as http,
    ):
        assert http.get("/health").json()["status"] == "ok"  # connected before the answer begins
        stream = client.stream("m", "def f(x):", max_tokens=400)
        assert isinstance(next(stream), Chunk)
        codes: list[int] = []
        stopping = threading.Thread(target=lambda: codes.append(fleet.stop("m-decode")))
        stopping.start()
        wait_until(lambda: http.get("/health").json()["status"] == "draining", 60, "the server to drain")
        refused = http.post("/generate", json={"model": "m", "prompt": "x"})
        for _ in stream:
            pass
        stopping.join()
    assert len(stream.completion.tokens) == 400
    assert codes == [0]
    assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE and refused.headers["retry-after"]
    assert '"event": "stopped"' in fleet.log("m-decode")


def test_a_fleet_without_its_prefill_host_falls_back_and_says_so(tmp_path: Path, model: Path) -> None:
    with running(write_hosts(tmp_path, {"m": model})) as fleet, fleet.client() as client:
        good = client.generate("m", "def f(x):", max_tokens=16)
        fleet.stop("m-prefill")
        answer = client.generate("m", "def f(x):", max_tokens=16)
    assert answer.text == good.text
    assert answer.metrics.method == "fallback"
    # The host is asked in vain, or known to be down by then. If it was last seen draining, it is waited for first.
    reasons = ("no server answers at https://", "no prefill host of m is up")
    stated = tuple(f"Using fallback mode - slower performance: {reason}" for reason in reasons)
    assert [warning for warning in answer.warnings if warning.startswith(stated)], answer.warnings


def test_without_its_decode_host_the_prefill_host_answers_alone_and_says_so(tmp_path: Path, model: Path) -> None:
    path = write_hosts(tmp_path, {"m": model})
    with running(path, "m-prefill") as fleet, fleet.client() as client:
        answer = client.generate("m", "def f(x):", max_tokens=8)
        fleet.stop("m-prefill")
        with pytest.raises(ServerUnavailable, match="Decode server unavailable - request failed") as caught:
            client.generate("m", "def f(x):", timeout=3.0)
    assert (answer.metrics.method, len(answer.tokens)) == ("prefill-alone", 8)
    assert any(warning.startswith("Using fallback mode - slower performance") for warning in answer.warnings)
    assert "disagg start" in str(caught.value)


def test_hosts_with_different_tokenizers_are_found_out_not_served(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other-tokenizer"
    shutil.copytree(model, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = write_hosts(tmp_path, {"m": model})
    path.write_text(path.read_text().replace(f'mlx = "{model}"', f'mlx = "{other}"'))
    with running(path) as fleet, fleet.client() as client:
        answer = client.generate("m", "Def F(X):", max_tokens=4)
    assert answer.metrics.method == "fallback"
    assert any("tokenizer" in warning for warning in answer.warnings), answer.warnings
