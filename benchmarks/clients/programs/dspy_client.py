"""DSPy, which asks through LiteLLM. Its signatures ask a model that it does not know in words: whether that is
understood is the model's doing."""

from __future__ import annotations

from typing import Any

import dspy
from checks import KEY, MODEL, QUESTION, V1, need, run

lm = dspy.LM(f"openai/{MODEL}", api_base=V1, api_key=KEY, max_tokens=200, cache=False, num_retries=0)


def ask() -> None:
    need(lm(QUESTION, max_tokens=24), "no text")


def stream() -> None:
    async def pieces() -> Any:
        async for one in dspy.streamify(dspy.Predict("question -> answer"), is_async_program=False)(question=QUESTION):
            need(one is not None, "no piece")
            return

    import asyncio

    with dspy.context(lm=lm):
        asyncio.run(pieces())


run(ask=ask, stream=stream)
