"""How many tokens a prompt has: a question to one host of its model, which tokenises it and computes nothing."""

from __future__ import annotations

import asyncio
import time

from disagg.api.requests import PromptBody
from disagg.api.status import CountAnswer
from disagg.errors import CapabilityMissing, DeadlineExceeded, Overloaded, ServerUnavailable
from disagg.inference.attempts.execute import Driver, GenerationRequest
from disagg.inference.http import calls

HOST_S = 20.0
"""For each step of one host's answer; the longest prompts take seconds to tokenise."""


async def count(driver: Driver, request: GenerationRequest) -> int:
    """Tokens of the request's prompt. Asks its hosts in turn, those first that can take a request, until one answers.

    Raises the last host's error if none does, and DeadlineExceeded.
    """
    given = {name: getattr(request.body, name) for name in PromptBody.__struct_fields__}
    body, now = PromptBody(**given), time.monotonic()
    hosts = [*request.candidates.decode, *request.candidates.prefill]
    hosts.sort(key=lambda host: (bool(driver.view.of(host.name).obstacle(now)), driver.view.of(host.name).ahead))
    failure: Overloaded | ServerUnavailable | None = None
    try:
        async with asyncio.timeout(body.deadline_s):
            for host in hosts:
                try:
                    answer = await calls.post(driver.http, host, "/count", body, timeout=HOST_S)
                    return CountAnswer.received(answer, host.name).prompt_tokens
                except (Overloaded, ServerUnavailable) as error:
                    failure = error
    except TimeoutError:
        raise DeadlineExceeded("no host has counted the prompt's tokens", "raise the timeout") from failure
    raise failure or CapabilityMissing(
        f"no host of {body.model} counts tokens: whole-request hosts have no call for it", "send the request"
    )
