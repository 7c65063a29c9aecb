"""How many tokens a prompt has: POST /count of one host of its model, which tokenises it and computes nothing."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from disagg.api.requests import CountBody, body_limit
from disagg.api.status import CountAnswer
from disagg.errors import CapabilityMissing, DeadlineExceeded, ProtocolError
from disagg.inference.attempts.execute import Driver, GenerationRequest
from disagg.inference.attempts.question import Asking, Question
from disagg.inference.http import host_calls
from disagg.inference.policy import longest_wait_s

HOST_S: Final = 20.0
"""How long each step of one host's answer may take; the longest prompts take seconds to tokenise. Less if the next host
would else have too little time."""


async def count(driver: Driver, request: GenerationRequest, *, list_tokens: bool = False) -> CountAnswer:
    """Tokens of the request's prompt. Asks its hosts in turn, those first that can take a request, until one answers.
    list_tokens: with the tokens themselves.

    Raises what `Question.to_one_of` raises, and DeadlineExceeded.
    """
    body, now = CountBody(**request.body.of_prompt, list_tokens=list_tokens), time.monotonic()
    most = body_limit(request.candidates.context) if list_tokens else host_calls.MAX_EVENT_BYTES
    hosts = [*request.candidates.decode, *request.candidates.prefill]
    hosts.sort(key=lambda host: (bool(driver.view.of(host.name).obstacle(now)), driver.view.of(host.name).ahead))

    async def ask(asking: Asking[CountBody]) -> CountAnswer:
        seconds = HOST_S if asking.last else min(HOST_S, longest_wait_s(asking.left_s))
        answer = await host_calls.post(
            driver.http, asking.host, "/count", asking.body, timeout=seconds, sent=asking.sent.set, most=most
        )
        counted = CountAnswer.received(answer, asking.host.name)
        if list_tokens and not (counted.prompt_tokens == len(counted.tokens) == len(counted.texts)):
            raise ProtocolError(f"{asking.host.name} counted {counted.prompt_tokens} tokens and listed others")
        return counted

    counting = Question(driver, request, body, ask)
    unable = CapabilityMissing(
        f"no host of {body.model} counts tokens: whole-request hosts have no call for it", "send the request"
    )
    try:
        async with asyncio.timeout(body.deadline_s):
            return await counting.to_one_of(hosts, unable)
    except TimeoutError:
        raise DeadlineExceeded("no host has counted the prompt's tokens", "raise the timeout") from counting.failure
    finally:
        counting.suspicion.end_turn()
