"""How many tokens a prompt has: POST /count of one host of its model, which tokenises it and computes nothing."""

from __future__ import annotations

import asyncio
import time

from disagg.api.requests import PromptBody
from disagg.api.status import CountAnswer
from disagg.errors import CapabilityMissing, DeadlineExceeded, DisaggError, KVMemoryExceeded, RequestError
from disagg.inference.attempts.execute import Driver, GenerationRequest
from disagg.inference.http import calls
from disagg.inference.policy import patience_s

HOST_S = 20.0
"""For each step of one host's answer; the longest prompts take seconds to tokenise. Less if the next host would else
have too little time."""


async def count(driver: Driver, request: GenerationRequest) -> int:
    """Tokens of the request's prompt. Asks its hosts in turn, those first that can take a request, until one answers.

    Raises the last host's error if none does, the first one's if the request is wrong, and DeadlineExceeded.
    """
    given = {name: getattr(request.body, name) for name in PromptBody.__struct_fields__}
    body, now = PromptBody(**given), time.monotonic()
    hosts = [*request.candidates.decode, *request.candidates.prefill]
    hosts.sort(key=lambda host: (bool(driver.view.of(host.name).obstacle(now)), driver.view.of(host.name).ahead))
    failure: DisaggError | None = None
    try:
        async with asyncio.timeout(body.deadline_s):
            for host in hosts:
                left_s = request.called + body.deadline_s - time.monotonic()
                seconds = HOST_S if host is hosts[-1] else min(HOST_S, patience_s(left_s))
                try:
                    answer = await calls.post(driver.http, host, "/count", body, timeout=seconds)
                    return CountAnswer.received(answer, host.name).prompt_tokens
                except DisaggError as error:
                    if isinstance(error, RequestError) and not isinstance(error, KVMemoryExceeded):
                        raise
                    failure = error
    except TimeoutError:
        raise DeadlineExceeded("no host has counted the prompt's tokens", "raise the timeout") from failure
    raise failure or CapabilityMissing(
        f"no host of {body.model} counts tokens: whole-request hosts have no call for it", "send the request"
    )
