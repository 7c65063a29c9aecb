"""MLX in front of MLX, through real servers in float32: whole prompts, their heads, and answers alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from disagg.inference.client import AsyncClient
from disagg.inference.types import Completion
from tests import tiny_models
from tests.engines.mlx.mlx_parts import prompt
from tests.fleets import TOKEN, RunningFleet, running, write_hosts

OPTIONS: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    folder = tmp_path_factory.mktemp("mlx-pair")
    model = tiny_models.make("gpt_oss", folder / "model")
    with running(write_hosts(folder, {"m": model}, prefill_engine="mlx", prefill={"chunk_tokens": 48})) as fleet:
        yield fleet


async def test_every_way_to_compute_a_prompt_gives_the_same_answer(fleet: RunningFleet) -> None:
    async with AsyncClient(fleet.fleet, token=TOKEN) as client:

        async def answer(length: int, **how: Any) -> Completion:
            tokens = prompt(length, seed=length)
            return await client.generate("m", tokens=tokens, cache_salt=f"{length}{how}", **OPTIONS, **how)

        for length in (98, 300):
            alone = await answer(length, alone="decode")
            there = await answer(length, alone="prefill")
            ways = [{"split": split, "local_prefill": False} for split in ("off", 1, 2, 3)]
            divided = await asyncio.gather(*(answer(length, **way) for way in ways))
            assert [one.metrics.layers for one in divided] == [None, 1, 2, 3]
            expected = [token.id for token in alone.tokens]
            assert [[token.id for token in one.tokens] for one in (there, *divided)] == [expected] * 5
    assert fleet.status("m-prefill")["backend"] == "mlx/cpu"
