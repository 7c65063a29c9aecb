"""/metrics, read as Prometheus reads it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from disagg.api.gateway import LiveHost
from disagg.api.status import SenderAudits
from disagg.errors import (
    DeadlineExceeded,
    DisaggError,
    ModelError,
    Overloaded,
    RequestEndedHosts,
    RequestLoop,
    ServerUnavailable,
)
from disagg.gateway.clients.keys import KeyFile
from disagg.gateway.dialects.base import GatewayRequest, Head
from disagg.gateway.dialects.problems import FAILURES, problem_of
from disagg.gateway.watch import metrics as requests
from disagg.gateway.watch.host_metrics import LiveCollector
from disagg.gateway.watch.metrics import FALLBACKS, KV_LOST, HarmfulRequests, RequestMetrics
from disagg.gateway.watch.request import Observers
from disagg.inference.attempt import Reason
from disagg.inference.types import Stage
from disagg.strikes import POLICY
from tests.gateway import fake_client
from tests.gateway.fake_client import FakeClient, completion

CHAT = {"model": "alias-of-m", "messages": [{"role": "user", "content": "hello"}]}


def samples(text: str) -> dict[str, float]:
    """Values by name and labels, as `name{label=value}`, of all models together; buckets are left out."""
    found = dict[str, float]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(
                f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "model_name"
            )
            if "le=" not in labels:
                name = f"{sample.name}{{{labels}}}" if labels else sample.name
                found[name] = found.get(name, 0.0) + sample.value
    return found


async def test_a_request_is_counted_under_its_model_s_name() -> None:
    async with fake_client.http(fake_client.app(FakeClient("one ", "two"))) as http:
        await http.post("/v1/chat/completions", json=CHAT)
        response = await http.get("/metrics")
    assert 'vllm:prompt_tokens_total{model_name="m"} 5.0' in response.text
    found = samples(response.text)
    assert found["vllm:generation_tokens_total"] == 2
    assert found["vllm:request_success_total{finished_reason=stop}"] == 1
    assert found["disagg_requests_total{method=disaggregated}"] == 1
    assert found["disagg_requests_running"] == 0
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.4
    assert found["disagg_ttft_part_seconds_total{part=prefill}"] == 0.2
    assert found["disagg_transfer_seconds_total{when=hidden}"] == 0.1


async def test_errors_are_counted_by_code_and_cancelled_requests_apart() -> None:
    failing = fake_client.app(FakeClient("one ", ServerUnavailable("gone")))
    async with fake_client.http(failing) as http:
        await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        await http.post("/v1/chat/completions", json={**CHAT, "model": "gpt"})
        found = samples((await http.get("/metrics")).text)
    assert found["disagg_request_errors_total{code=no_host_available}"] == 1
    assert found["disagg_request_errors_total{code=model_not_found}"] == 1
    assert found["vllm:request_success_total{finished_reason=stop}"] == 0


async def test_a_request_that_ended_hosts_is_named_with_its_key_for_an_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.json"
    bearer = f"Bearer {KeyFile(file).add('agent', monitor=True)}"
    harmful = fake_client.app(FakeClient(RequestEndedHosts("d1 and d2 ended")), file)
    async with fake_client.http(harmful, Authorization=bearer) as http:
        for _ in range(2):
            answer = await http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "of-the-agent"})
        found = samples((await http.get("/metrics")).text)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false")
        assert answer.json()["error"]["code"] == "request_ended_hosts"
        assert found["disagg_request_ended_hosts{key=agent,request_id=of-the-agent}"] == 1
        await http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "of-the-agent"})
        text = (await http.get("/metrics")).text
        assert text.count("disagg_request_ended_hosts{") == 1, "Prometheus takes no sample twice"
        other = {"Authorization": f"Bearer {KeyFile(file).add('other')}"}
        seen = (await http.get("/metrics", headers=other)).text
        assert "vllm:prompt_tokens" in seen and "agent" not in seen, "a key sees nothing of the others' requests"
        later = time.monotonic() + POLICY.refused_s
        monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: later))
        assert "disagg_request_ended_hosts{" not in (await http.get("/metrics")).text


async def test_every_figure_of_a_model_is_0_before_its_first_request_so_that_a_rate_sees_that_one() -> None:
    async with fake_client.http(fake_client.app(FakeClient("one ", "two"))) as http:
        before = samples((await http.get("/metrics")).text)
        await http.post("/v1/chat/completions", json=CHAT)
        after = samples((await http.get("/metrics")).text)
    new = {name.split("{")[0].rpartition("_")[0] for name in after.keys() - before.keys()}
    assert new == {"disagg_routes"}
    counted = [name for name in before if "_created" not in name and not name.startswith(("disagg_host", "python_"))]
    assert [name for name in counted if before[name]] == []


def test_fallbacks_are_counted_from_0_on_for_every_reason_that_an_attempt_can_have() -> None:
    chosen = {"first choice", "prefill host is loading", "decode host is loading"}  # and nothing has failed
    assert set(FALLBACKS) == {KV_LOST, *get_args(Reason)} - chosen


def test_failures_are_counted_from_0_on_by_the_codes_that_their_errors_have() -> None:
    kinds = (ServerUnavailable, ModelError, DeadlineExceeded, DisaggError, Overloaded, RequestLoop)
    assert {problem_of(kind("x")).code for kind in kinds} == set(FAILURES)


async def test_a_running_request_is_seen_while_it_runs() -> None:
    client = FakeClient(0.2, "one ")
    async with fake_client.http(fake_client.app(client)) as http:
        running = asyncio.ensure_future(http.post("/v1/chat/completions", json=CHAT))
        while not client.asked:
            await asyncio.sleep(0.01)
        assert samples((await http.get("/metrics")).text)["disagg_requests_running"] == 1
        await running
        assert samples((await http.get("/metrics")).text)["disagg_requests_running"] == 0


async def test_the_figures_need_a_key_once_there_is_one(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.add("prometheus")
    async with fake_client.http(fake_client.app(FakeClient(), file.path)) as http:
        assert (await http.get("/metrics")).status_code == 401


def test_a_whole_request_host_adds_nothing_to_the_times_that_it_does_not_state() -> None:
    registry = CollectorRegistry()
    observers = Observers([RequestMetrics(registry, [], HarmfulRequests())])
    request = GatewayRequest(model="m", prompts=({"prompt": "x"},), n=2)
    observed = observers.accept(Head(request, "r", 0.0), "openai-chat", "m", None)
    observed.completed(0, completion("one"))
    whole = completion("one")
    observed.completed(1, replace(whole, metrics=replace(whole.metrics, method="whole")))
    found = samples(generate_latest(registry).decode())
    counts = {name: found[f"vllm:{name}_seconds_count"] for name in ("request_prefill_time", "request_queue_time")}
    assert counts == {"request_prefill_time": 1, "request_queue_time": 1}
    assert found["vllm:e2e_request_latency_seconds_count"] == 2


def test_an_answer_of_a_prefill_host_for_want_of_a_decode_host_counts_as_a_fallback() -> None:
    registry = CollectorRegistry()
    request = GatewayRequest(model="m", prompts=({"prompt": "x"},))
    observed = Observers([RequestMetrics(registry, [], HarmfulRequests())]).accept(
        Head(request, "r", 0.0), "openai-chat", "m", None
    )
    observed.entered(0, Stage("decode", "prefill-alone", "p", None, reason="no decode host is left"))
    whole = completion("one")
    observed.completed(0, replace(whole, metrics=replace(whole.metrics, method="prefill-alone")))
    assert samples(generate_latest(registry).decode())["disagg_fallbacks_total{reason=no decode host is left}"] == 1


def test_a_cancelled_request_with_one_complete_answer_counts_both() -> None:
    registry = CollectorRegistry()
    observers = Observers([RequestMetrics(registry, [], HarmfulRequests())])
    request = GatewayRequest(model="m", prompts=({"prompt": "x"},), n=2)
    observed = observers.accept(Head(request, "r", 0.0), "openai-chat", "m", None)
    observed.completed(0, completion("one", held_tokens=4))
    observed.ended()
    found = samples(generate_latest(registry).decode())
    assert found["disagg_requests_cancelled_total"] == found["vllm:request_success_total{finished_reason=stop}"] == 1
    assert (found["vllm:prefix_cache_hits_total"], found["vllm:prefix_cache_queries_total"]) == (4, 5)


def test_what_decode_hosts_find_of_received_kv_is_counted_for_each_pair() -> None:
    found = {"dgx": SenderAudits(accepted=7, refuted=1, deviation=0.03), "new": SenderAudits(refuted=2)}
    mac = LiveHost(name="mac", role="decode", model="m", state="up", senders=found)
    registry = CollectorRegistry()
    registry.register(LiveCollector(lambda: ["m"], lambda: [mac], lambda model: (0, 0)))
    figures = samples(generate_latest(registry).decode())
    assert {name: value for name, value in figures.items() if "kv_audits" in name or "deviation" in name} == {
        "disagg_kv_audits_total{host=mac,sender=dgx,verdict=accepted}": 7,
        "disagg_kv_audits_total{host=mac,sender=dgx,verdict=refuted}": 1,
        "disagg_kv_audits_total{host=mac,sender=new,verdict=accepted}": 0,
        "disagg_kv_audits_total{host=mac,sender=new,verdict=refuted}": 2,
        "disagg_kv_deviation{host=mac,sender=dgx}": 0.03,
    }
