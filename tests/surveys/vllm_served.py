"""What real servers answer with a tiny random model that vLLM prefills, alone or with two ranks.

A prefill server with vLLM and a decode server are started; prompts of 1 to 700 tokens are read in steps of 96, handed
over and answered with 64 tokens in one batch, the longest one also after a held prefix. The answers are compared with
those of vLLM alone and of mlx-lm alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.inference.client import AsyncClient
from disagg.inference.types import Completion
from tests.fleets import TOKEN, RunningFleet, running, write_hosts
from tests.surveys.architectures import ANSWER, HELD, Asked, answered_by_mlx, ids
from tests.surveys.vllm_calls import CONTEXT

OPTIONS = {"chunk_tokens": 96, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}


def verdict(model: Path, folder: Path, ranks: int, prompts: dict[int, Asked]) -> str:
    """Exact, or the first prompt that is answered otherwise. folder: of the servers' files. prompts: of this model; if
    there are none they are chosen."""
    folder.mkdir()
    prefill = {**OPTIONS, "tensor_parallel": ranks}
    path = write_hosts(folder, {"m": model}, context=CONTEXT, prefill_engine="vllm", prefill=prefill)
    with running(path) as fleet:
        if not prompts:
            prompts |= asyncio.run(answered_by_mlx(fleet))
        return asyncio.run(compared(fleet, prompts))


async def compared(fleet: RunningFleet, prompts: Mapping[int, Asked]) -> str:
    """The verdict on a running fleet."""
    asked = list(prompts.values())
    longest = asked[-1]

    async with AsyncClient(fleet.fleet, token=TOKEN) as client:

        async def answer(tokens: Sequence[int], salt: str, **how: Any) -> Completion:
            return await client.generate("m", tokens=tokens, cache_salt=salt, **ANSWER, **how)

        async def answers(**how: Any) -> list[Completion]:
            return await asyncio.gather(*(answer(one.tokens, f"{how}{len(one.tokens)}", **how) for one in asked))

        handed_over = await answers(local_prefill=False)
        await answer(longest.tokens[:HELD], "held", local_prefill=False)
        after_prefix = await answer(longest.tokens, "held", local_prefill=False)
        vllm = await answers(alone="prefill")
    for one, made, of_vllm in zip((*asked, longest), (*handed_over, after_prefix), (*vllm, vllm[-1]), strict=True):
        prefix = " after a held prefix" if made is after_prefix else ""
        where = f"at {len(one.tokens)} tokens through servers{prefix}"
        if ids(made) != ids(of_vllm):
            which = "also without a hand-off" if one.answer != ids(of_vllm) else "by the hand-off"
            return f"**differs** from vLLM {where}, {which}"
        if ids(made) != one.answer:
            return f"**differs** from mlx-lm {where}"
        if len(one.tokens) > 1 and made.metrics.method != "disaggregated":
            return f"**no hand-off** {where}: {made.metrics.method}"
    return "exact"
