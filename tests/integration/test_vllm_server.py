"""A stock `vllm serve` with our connector prefills, MLX decodes: see `test_vllm`, whose prompts these are.

The `vllm serve` is a process of its own, as somebody else would run it; the prefill host beside it talks HTTP to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from disagg.inference.client import AsyncClient
from tests import tiny_models
from tests.fleets import HAS_VLLM, TOKEN, RunningFleet, free_ports, running, write_hosts
from tests.integration.test_vllm import ANSWER, ARCHITECTURES, LENGTHS, by_transformers, ids, prompt
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
    expected = by_transformers(pair.fleet, prompts)
    async with AsyncClient(pair.fleet.fleet, token=TOKEN) as client:
        for tokens, wanted in zip(prompts, expected, strict=True):
            handed_over = await client.generate("m", tokens=tokens, cache_salt=f"{len(tokens)}", **ANSWER)
            assert handed_over.metrics.method == "disaggregated"
            assert ids(handed_over) == wanted, f"{len(tokens)} tokens"
            alone = await client.generate("m", tokens=tokens, alone="decode", cache_salt="alone", **ANSWER)
            assert ids(alone) == wanted
            there = await client.generate("m", tokens=tokens, alone="prefill", cache_salt="there", **ANSWER)
            assert ids(there) == wanted
