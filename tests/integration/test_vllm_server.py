"""A stock `vllm serve` with our connector prefills, MLX decodes: see `test_vllm`, whose prompts these are.

The `vllm serve` is a process of its own, as somebody else would run it; the prefill host beside it talks HTTP to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from disagg.inference.client import AsyncClient
from disagg.servers.monitor import EXIT_CODE
from tests.deadlines import wait_until
from tests.fleets import TOKEN, RunningFleet, needs_vllm, running, write_hosts
from tests.integration.test_vllm import ANSWER, LENGTHS, ids, made, prompt, require_those_of_transformers
from tests.ports import free_ports
from tests.vllm_serve import VLLMServe, vllm_serve

pytestmark = [
    needs_vllm,
    pytest.mark.timeout(1500),
]
PATIENCE_S = 600.0
LONG = 3000


@dataclass(frozen=True, slots=True)
class Pair:
    """A fleet, and the `vllm serve` behind its prefill host."""

    fleet: RunningFleet
    vllm: VLLMServe


@pytest.fixture(scope="module", params=["nemotron_h"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    model = made(request.param, folder)
    (port,) = free_ports(1)
    with ExitStack() as stack:
        vllm = stack.enter_context(vllm_serve(folder, model, port))
        hosts = write_hosts(folder, {"m": model}, prefill_engine="vllm-server", prefill={"url": vllm.url})
        yield Pair(stack.enter_context(running(hosts)), vllm)


async def test_every_length_gives_the_tokens_of_both_frameworks_alone(pair: Pair) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    async with AsyncClient(pair.fleet.fleet, token=TOKEN) as client:
        handed_over = [
            await client.generate("m", tokens=tokens, cache_salt=f"{len(tokens)}", **ANSWER) for tokens in prompts
        ]
        by_decode = await asyncio.gather(
            *(
                client.generate("m", tokens=tokens, alone="decode", cache_salt=f"alone {len(tokens)}", **ANSWER)
                for tokens in prompts
            )
        )
        by_prefill = [
            await client.generate("m", tokens=tokens, alone="prefill", cache_salt=f"there {len(tokens)}", **ANSWER)
            for tokens in prompts
        ]
    for alone in (by_decode, by_prefill):
        assert [ids(answer) for answer in alone] == [ids(answer) for answer in handed_over]
    assert [answer.metrics.method for answer in handed_over] == ["disaggregated"] * len(LENGTHS)
    require_those_of_transformers(pair.fleet, prompts, handed_over)


async def test_its_status_states_what_vllm_computes(pair: Pair) -> None:
    async with AsyncClient(pair.fleet.fleet, token=TOKEN) as client:
        await client.generate("m", tokens=prompt(300, seed=5), **ANSWER)
    status = pair.fleet.status("m-prefill")
    assert status["backend"] == "vllm-server/cpu"
    assert {one["status"] for one in status["preflight"]} == {"ok"}
    assert load(pair, "m-prefill")["prefill_tokens_s"] > 0


async def test_what_is_cancelled_leaves_no_request_no_block_and_no_kv(pair: Pair) -> None:
    async with AsyncClient(pair.fleet.fleet, token=TOKEN) as client:
        answers = [
            asyncio.ensure_future(client.generate("m", tokens=prompt(3000, seed), **ANSWER)) for seed in range(10, 14)
        ]
        await asyncio.to_thread(wait_until, lambda: pair.vllm.busy()[0] > 0)
        for answer in answers:
            answer.cancel()
        ends = await asyncio.gather(*answers, return_exceptions=True)
    assert any(isinstance(end, asyncio.CancelledError) for end in ends)
    await asyncio.to_thread(wait_until, lambda: pair.vllm.busy() == (0, 0))
    await asyncio.to_thread(wait_until, lambda: load(pair, "m-prefill")["kv_bytes"] == 0)
    await asyncio.to_thread(wait_until, lambda: load(pair, "m-decode")["kv_bytes"] == 0)


async def test_a_server_that_hangs_is_left_in_seconds_and_the_decode_host_answers_its_prompts(
    pair: Pair,
) -> None:
    """All its processes are stopped while it computes: its connections stay, and nobody answers. The prefill host ends,
    as its service manager is to start it again."""
    tokens = prompt(300, seed=77)
    with stopped(pair.vllm):
        async with AsyncClient(pair.fleet.fleet, token=TOKEN) as client:
            completion = await client.generate("m", tokens=tokens, cache_salt="hangs", **ANSWER)
        await asyncio.to_thread(wait_until, lambda: pair.fleet.processes["m-prefill"].poll() is not None)
    assert pair.fleet.processes.pop("m-prefill").poll() == EXIT_CODE
    require_those_of_transformers(pair.fleet, [tokens], [completion])
    assert completion.metrics.method == "fallback"
    host = pair.fleet.fleet.hosts["m-prefill"]
    pair.fleet.start(host)
    await asyncio.to_thread(pair.fleet.wait_ready, host)


async def test_a_server_that_is_killed_while_it_sends_leaves_the_prompt_to_the_decode_host(pair: Pair) -> None:
    """The last test of this server. A prompt that is past its half when it is looked at is followed by another."""
    parent = psutil.Process(pair.vllm.process.pid)
    processes = [*parent.children(recursive=True), parent]
    async with AsyncClient(pair.fleet.fleet, token=TOKEN) as client:
        for seed in range(1000):
            tokens = prompt(LONG, seed)
            answer = asyncio.ensure_future(client.generate("m", tokens=tokens, **ANSWER))
            left = 0
            while not (answer.done() or 0 < left < LONG - 1):
                left = int((await asyncio.to_thread(load, pair, "m-prefill"))["queue_tokens"])
            if left > LONG // 2:
                break
            await answer
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        completion = await answer
    require_those_of_transformers(pair.fleet, [tokens], [completion])
    assert completion.metrics.method == "fallback"
    assert any("Using fallback mode" in warning for warning in completion.warnings)
    await asyncio.to_thread(wait_until, lambda: pair.fleet.processes["m-prefill"].poll() is not None)


@contextmanager
def stopped(server: VLLMServe) -> Iterator[None]:
    """All processes of the server are stopped within the block."""
    parent = psutil.Process(server.process.pid)
    processes = [*parent.children(recursive=True), parent]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def load(pair: Pair, host: str) -> dict[str, Any]:
    with pair.fleet.http(host) as http:
        return dict(http.get("/load").json())
