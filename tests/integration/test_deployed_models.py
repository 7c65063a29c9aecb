"""Hosts with several models that are deployed: their list changes while they serve. Real SSH, keepers and servers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.deadlines import wait_until
from tests.integration.deployed import Operator
from tests.testbed.bed import Bed
from tests.testbed.uv import install_uv

PREFILL, DECODE = "dgx-spark-1", "mac-studio-2"
QWEN, GPT_OSS = "qwen3-demo", "gpt-oss-demo"
PATIENCE_S = 240.0
HOSTS = """\
[deploy]
installer = "uv"
cuda_on_cpu = true

[fleet]
name = "several"

[models.qwen3-demo]
context = 4096
sources = {transformers = "package:demo/models/qwen3-moe-tiny", mlx = "package:demo/models/qwen3-moe-tiny"}

[models.gpt-oss-demo]
context = 4096
sources = {transformers = "package:demo/models/gpt-oss-tiny", mlx = "package:demo/models/gpt-oss-tiny"}
"""
HOST = """
[hosts.NAME]
address = "ADDRESS"
roles = ["ROLE"]
models = ["qwen3-demo"]
preload = ["qwen3-demo"]
port = 8000
ports = "8100-8109"
service = "process"
engine = {name = "ENGINE", dtype = "float32", device = "cpu", threads = 1, KV = 67_108_864}
"""

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture(scope="module")
def fleet(machines: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """A host per role with one model in its list, deployed and started. Afterwards nothing runs on either."""
    machines.need_links()
    folder = tmp_path_factory.mktemp("operator")
    text = HOSTS
    for name, role, engine, kv in (
        (PREFILL, "prefill", "transformers", "max_held_bytes"),
        (DECODE, "decode", "mlx", "max_kv_bytes"),
    ):
        own = {"NAME": name, "ADDRESS": machines.hosts[name].address, "ROLE": role, "ENGINE": engine, "KV": kv}
        table = HOST
        for old, new in own.items():
            table = table.replace(old, new)
        text += table
    with machines.entered():
        install_uv(machines)
        path = folder / "hosts.toml"
        path.write_text(text)
        made = Operator(machines, path, folder)
        made.run("deploy", "--yes", timeout=PATIENCE_S)
        made.run("start", "--timeout", PATIENCE_S, timeout=PATIENCE_S + 60)
        wait_until(lambda: all(_states(made, name) == {QWEN: "ready"} for name in (PREFILL, DECODE)), PATIENCE_S)
        yield made
        made.run("stop")
        assert not [line for name in (PREFILL, DECODE) for line in _processes(machines, name).values()]


def _processes(bed: Bed, name: str) -> dict[int, str]:
    """The keeper and the servers of a host: their pids, and the host that each serves."""
    found: dict[int, str] = {}
    for process in bed.hosts[name].processes():
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if "disagg.keeper" in words or "disagg.servers" in words:
                found[process.pid] = words[words.index("--host") + 1]
    return found


def _kept(fleet: Operator, name: str) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = fleet.status()[name]["models"]
    return models


def _states(fleet: Operator, name: str) -> dict[str, str]:
    return {one["model"]: one["state"] for one in _kept(fleet, name)}


def _answer(fleet: Operator, model: str) -> dict[str, Any]:
    done = fleet.run("generate", "-m", model, "--max-tokens", "8", "--json", "def f(n):", timeout=PATIENCE_S)
    result: dict[str, Any] = json.loads(done.stdout)["results"][0]
    return result


def _deployed(fleet: Operator) -> dict[str, dict[str, Any]]:
    done = fleet.run("deploy", "--yes", "--json", timeout=PATIENCE_S)
    return {one["host"]: one for one in json.loads(done.stdout)["hosts"]}


def test_a_model_that_is_loaded_at_start_answers_over_both_hosts(fleet: Operator) -> None:
    assert {name: sorted(_processes(fleet.bed, name).values()) for name in (PREFILL, DECODE)} == {
        name: [name, f"{name}/{QWEN}"] for name in (PREFILL, DECODE)
    }
    answer = _answer(fleet, QWEN)
    assert answer["text"] and answer["metrics"]["method"] == "disaggregated"


def test_a_longer_list_is_read_while_everything_runs_and_leaves_nothing_pending(fleet: Operator) -> None:
    before = {name: _processes(fleet.bed, name) for name in (PREFILL, DECODE)}
    text = fleet.config.read_text()
    fleet.config.write_text(text.replace(f'models = ["{QWEN}"]', f'models = ["{QWEN}", "{GPT_OSS}"]'))
    reports = _deployed(fleet)
    for name in (PREFILL, DECODE):
        plan = reports[name]["plan"]
        assert [step["name"] for step in plan["steps"]] == ["prepare", "model", "adopt", "list", "tidy"]
        assert plan["needs"] == ""
    both = {QWEN: "ready", GPT_OSS: "asleep"}
    wait_until(lambda: all(_states(fleet, name) == both for name in (PREFILL, DECODE)), PATIENCE_S)
    assert {name: _processes(fleet.bed, name) for name in (PREFILL, DECODE)} == before
    status = fleet.status()
    assert [(one["state"], one["why"], one["pending"]) for one in status.values()] == [("healthy", "", None)] * 2
    assert [one["result"] for one in _deployed(fleet).values()] == ["unchanged"] * 2
    assert _answer(fleet, GPT_OSS)["text"]  # by whichever of the two has loaded it first, or by both
    assert before[DECODE].items() <= _processes(fleet.bed, DECODE).items()


def test_the_log_of_a_model_is_shown_alone(fleet: Operator) -> None:
    shown = fleet.run("logs", "--model", QWEN, "--host", DECODE, "-n", "500").stdout
    assert f"{DECODE}/{QWEN}" in shown and "ready" in shown and GPT_OSS not in shown


def test_a_keeper_that_is_killed_comes_back_and_no_process_is_there_twice(fleet: Operator) -> None:
    (keeper,) = [pid for pid, host in _processes(fleet.bed, DECODE).items() if host == DECODE]
    os.kill(keeper, signal.SIGKILL)

    def back() -> bool:
        found = _processes(fleet.bed, DECODE)
        return keeper not in found and sorted(found.values()) == [DECODE, f"{DECODE}/{QWEN}"]

    wait_until(back, PATIENCE_S, "the keeper and its model to be back")
    wait_until(lambda: _states(fleet, DECODE)[QWEN] == "ready", PATIENCE_S)
    assert _answer(fleet, QWEN)["text"]


def test_a_shorter_list_ends_the_process_of_the_model_alone(fleet: Operator) -> None:
    assert _answer(fleet, GPT_OSS)["text"]
    before = {pid: host for pid, host in _processes(fleet.bed, DECODE).items() if GPT_OSS not in host}
    text = fleet.config.read_text()
    fleet.config.write_text(text.replace(f'models = ["{QWEN}", "{GPT_OSS}"]', f'models = ["{QWEN}"]'))
    assert {one["plan"]["needs"] for one in _deployed(fleet).values()} == {""}
    wait_until(lambda: _processes(fleet.bed, DECODE) == before, PATIENCE_S, "the model's process to end")
    assert _states(fleet, DECODE) == {QWEN: "ready"}


def test_a_restart_takes_every_process_of_the_host_and_brings_back_what_is_loaded_at_start(fleet: Operator) -> None:
    before = _processes(fleet.bed, DECODE)
    fleet.run("restart", "--host", DECODE, "--timeout", PATIENCE_S, timeout=PATIENCE_S + 60)
    wait_until(lambda: _states(fleet, DECODE) == {QWEN: "ready"}, PATIENCE_S)
    after = _processes(fleet.bed, DECODE)
    assert sorted(after.values()) == sorted(before.values()) and after.keys().isdisjoint(before)


def test_doctor_examines_hosts_with_several_models_and_their_link(fleet: Operator) -> None:
    done = fleet.run("doctor", "--json", timeout=PATIENCE_S)
    found = json.loads(done.stdout)
    faults = [one for part in (*found["hosts"], *found["pairs"]) for one in part["findings"] if one["level"] == "fault"]
    assert (found["ok"], faults) == (True, [])
    assert [(one["prefill"], one["decode"]) for one in found["pairs"]] == [(PREFILL, DECODE)]


def test_a_new_token_reaches_every_process_and_none_is_restarted(fleet: Operator) -> None:
    before = {name: _processes(fleet.bed, name) for name in (PREFILL, DECODE)}
    fleet.run("token", "rotate", "--yes", timeout=PATIENCE_S)
    assert {name: _processes(fleet.bed, name) for name in (PREFILL, DECODE)} == before
    assert _answer(fleet, QWEN)["metrics"]["method"] == "disaggregated"


def test_a_rollout_restarts_keepers_one_after_the_other_and_tests_what_they_load_at_start(fleet: Operator) -> None:
    before = {name: set(_processes(fleet.bed, name)) for name in (PREFILL, DECODE)}
    text = fleet.config.read_text()
    fleet.config.write_text(text.replace("port = 8000\n", "port = 8000\nqueue_size = 5\n"))
    report = json.loads(fleet.run("rollout", "--yes", "--json", timeout=PATIENCE_S).stdout)
    assert report["ok"] and {one["outcome"] for one in report["hosts"]} == {"rolled out"}
    assert all(before[name].isdisjoint(_processes(fleet.bed, name)) for name in before)
    assert _answer(fleet, QWEN)["text"]
