"""What real servers answer with a tiny random model that vLLM prefills, alone or with two ranks.

A prefill server with vLLM and a decode server are started; prompts of 1 to 700 tokens are read in steps of 96, handed
over and answered with 64 tokens in one batch, the longest one also after a held prefix. The answers are compared with
those of vLLM alone and of mlx-lm alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagg.inference.client import AsyncClient
from disagg.inference.types import Completion
from tests.engines.mlx.mlx_parts import prompt
from tests.fleets import TOKEN, RunningFleet, running, write_hosts
from tests.surveys.architectures import HELD, LENGTHS, TOKENS
from tests.surveys.vllm_calls import CONTEXT

OPTIONS = {"chunk_tokens": 96, "kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}
_ASKED: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}


def verdict(model: Path, folder: Path, ranks: int) -> str:
    """Exact, or the first prompt that is answered otherwise. folder: of the servers' files."""
    folder.mkdir()
    prefill = {**OPTIONS, "tensor_parallel": ranks}
    path = write_hosts(folder, {"m": model}, context=CONTEXT, prefill_engine="vllm", prefill=prefill)
    with running(path) as fleet:
        return asyncio.run(compared(fleet))


async def compared(fleet: RunningFleet) -> str:
    """The verdict on a running fleet."""
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    longest = prompts[-1]

    async with AsyncClient(fleet.fleet, token=TOKEN) as client:

        async def answer(tokens: Sequence[int], salt: str, **how: Any) -> Completion:
            return await client.generate("m", tokens=tokens, cache_salt=salt, **_ASKED, **how)

        async def answers(**how: Any) -> list[Completion]:
            return await asyncio.gather(*(answer(tokens, f"{how}{len(tokens)}", **how) for tokens in prompts))

        handed_over = await answers(local_prefill=False)
        await answer(longest[:HELD], "held", local_prefill=False)
        after_prefix = await answer(longest, "held", local_prefill=False)
        mlx, vllm = await answers(alone="decode"), await answers(alone="prefill")
    for tokens, made, of_vllm, of_mlx in zip(
        (*prompts, longest), (*handed_over, after_prefix), (*vllm, vllm[-1]), (*mlx, mlx[-1]), strict=True
    ):
        where = f"at {len(tokens)} tokens through servers" + (" after a held prefix" if made is after_prefix else "")
        if ids(made) != ids(of_vllm):
            which = "also without a hand-off" if ids(of_mlx) != ids(of_vllm) else "by the hand-off"
            return f"**differs** from vLLM {where}, {which}"
        if ids(made) != ids(of_mlx):
            return f"**differs** from mlx-lm {where}"
        if len(tokens) > 1 and made.metrics.method != "disaggregated":
            return f"**no hand-off** {where}: {made.metrics.method}"
    return "exact"


def ids(answer: Completion) -> Sequence[int]:
    return [token.id for token in answer.tokens]
