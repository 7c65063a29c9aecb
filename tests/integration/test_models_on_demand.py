"""Calls of the client, and commands that measure and compare, for models that are not loaded: real keepers and engines,
tiny models."""

from __future__ import annotations

import json

import pytest

from disagg.inference.client import AsyncClient
from disagg.inference.http import keeper_calls
from disagg.inference.http.connections import Connections
from disagg.token import TOKEN_FILE_VARIABLE, Tokens
from tests.cli.commandline import run
from tests.faults.kept import unloaded
from tests.fleets import TOKEN, RunningFleet

pytestmark = pytest.mark.slow
PROMPT = list(range(10, 58))


async def unload(fleet: RunningFleet, *models: str) -> None:
    async with Connections(Tokens(TOKEN)) as http:
        for host in fleet.fleet.hosts.values():
            for model in models:
                await unloaded(http, host, model)


async def loads(fleet: RunningFleet) -> dict[str, int]:
    async with Connections(Tokens(TOKEN)) as http:
        hosts = fleet.fleet.hosts.values()
        return {
            f"{host.name}/{kept.model}": kept.loads for host in hosts for kept in await keeper_calls.models(http, host)
        }


async def test_calls_of_a_client_wake_what_they_need_and_no_model_is_loaded_twice(kept_fleet: RunningFleet) -> None:
    await unload(kept_fleet, "llama", "qwen3")
    before = await loads(kept_fleet)
    async with AsyncClient(kept_fleet.fleet, token=TOKEN) as client:
        assert await client.count_tokens("llama", tokens=PROMPT) == len(PROMPT)
        requests = [{"model": model, "tokens": PROMPT, "max_tokens": 4} for model in ("llama", "qwen3")]
        together = await client.generate_all(requests)
        assert [answer.error for answer in together.answers] == [None, None]
        scores = await client.score("qwen3", tokens=PROMPT)
        assert len(scores.tokens) == len(PROMPT)
        handed_off = await client.generate("llama", tokens=PROMPT, max_tokens=4, local_prefill=False, cache_salt="new")
        assert handed_off.metrics.method == "disaggregated"
    more = {name: count - before[name] for name, count in (await loads(kept_fleet)).items() if count > before[name]}
    assert set(more.values()) == {1} and len(more) <= 4, more


def test_generate_says_what_it_waits_for(
    kept_fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    asyncio.run(unload(kept_fleet, "llama"))
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(kept_fleet.folder / "token"))
    assert run("--config", kept_fleet.fleet.path, "generate", "-m", "llama", "x = 1", "--max-tokens", "4") == 0
    out, err = capsys.readouterr()
    assert out and "note: loading " in err and " s: llama on " in err


def test_verify_loads_the_model_on_all_of_its_hosts_and_compares_them(
    kept_fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(kept_fleet.folder / "token"))
    size = ("--prompt-tokens", "64", "--max-tokens", "4")
    assert run("--config", kept_fleet.fleet.path, "verify", "llama", *size, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {(pair["prefill"], pair["decode"]) for pair in report["pairs"]} == {
        (f"prefill-{one}/llama", f"decode-{other}/llama") for one in (1, 2) for other in (1, 2)
    }


def test_bench_loads_the_model_before_it_measures(
    kept_fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(kept_fleet.folder / "token"))
    spec = ("--prompt-tokens", "32", "--output-tokens", "4", "--requests", "2", "--rounds", "1", "--warmup", "0")
    assert (
        run("--config", kept_fleet.fleet.path, "bench", "-m", "llama", *spec, "--mode", "disaggregated", "--json") == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert {host["name"] for host in result["hosts"]} == {f"{name}/llama" for name in kept_fleet.fleet.hosts}
