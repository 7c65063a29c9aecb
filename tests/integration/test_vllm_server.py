"""A stock `vllm serve` with our connector prefills, MLX decodes: see `test_vllm`, whose prompts these are.

The `vllm serve` is a process of its own, as somebody else would run it; the prefill host beside it talks HTTP to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from disagg.inference.client import AsyncClient
from tests import tiny_models
from tests.fleets import HAS_VLLM, TOKEN, RunningFleet, running, write_hosts
from tests.integration.test_vllm import ANSWER, ARCHITECTURES, LENGTHS, ids, prompt, require_those_of_transformers
from tests.ports import free_ports
from tests.vllm_serve import VLLMServe, vllm_serve

pytestmark = [
    pytest.mark.skipif(not HAS_VLLM, reason="no environment with vLLM: make .venv-vllm/.ready"),
    pytest.mark.timeout(420),
]
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A fleet, and the `vllm serve` behind its prefill host."""

    fleet: RunningFleet
    vllm: VLLMServe


@pytest.fixture(scope="module", params=["llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_models.make(request.param, folder / "model", **ARCHITECTURES[request.param])
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
            *(client.generate("m", tokens=tokens, alone="decode", cache_salt="alone", **ANSWER) for tokens in prompts)
        )
        by_prefill = [
            await client.generate("m", tokens=tokens, alone="prefill", cache_salt="there", **ANSWER)
            for tokens in prompts
        ]
    for alone in (by_decode, by_prefill):
        assert [ids(answer) for answer in alone] == [ids(answer) for answer in handed_over]
    assert [answer.metrics.method for answer in handed_over] == ["disaggregated"] * len(LENGTHS)
    require_those_of_transformers(pair.fleet, prompts, handed_over)
