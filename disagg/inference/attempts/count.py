"""How many tokens a prompt has: POST /count of one host of its model, which tokenises it and computes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from disagg.api.requests import PromptBody
from disagg.api.status import CountAnswer
from disagg.config import Host
from disagg.errors import CapabilityMissing, DeadlineExceeded, DisaggError, KVMemoryExceeded, RequestError
from disagg.inference.attempts.execute import Driver, GenerationRequest
from disagg.inference.attempts.suspects import Suspicion, broke_off
from disagg.inference.http import host_calls
from disagg.inference.policy import longest_wait_s

HOST_S = 20.0
"""How long each step of one host's answer may take; the longest prompts take seconds to tokenise. Less if the next host
would else have too little time."""


async def count(driver: Driver, request: GenerationRequest) -> int:
    """Tokens of the request's prompt. Asks its hosts in turn, those first that can take a request, until one answers.

    Raises the last host's error if none does, the first one's if the request is wrong, DeadlineExceeded, and
    RequestEndedHosts if hosts end as they tokenise the prompt.
    """
    body, now = PromptBody(**request.body.of_prompt), time.monotonic()
    hosts = [*request.candidates.decode, *request.candidates.prefill]
    hosts.sort(key=lambda host: (bool(driver.view.of(host.name).obstacle(now)), driver.view.of(host.name).ahead))
    counting = _Count(driver, request, body, Suspicion(driver.suspects, body, request.policy))
    try:
        async with asyncio.timeout(body.deadline_s):
            return await counting.by_one_of(hosts)
    except TimeoutError:
        raise DeadlineExceeded("no host has counted the prompt's tokens", "raise the timeout") from counting.failure
    finally:
        counting.suspicion.end_turn()


@dataclass(slots=True)
class _Count:
    """failure: the last one."""

    driver: Driver
    request: GenerationRequest
    body: PromptBody
    suspicion: Suspicion
    failure: DisaggError | None = None

    async def by_one_of(self, hosts: Sequence[Host]) -> int:
        """What the first of these hosts counts that answers."""
        http, suspicion = self.driver.http, self.suspicion
        suspicion.look()
        for host in hosts:
            left_s = self.request.called + self.body.deadline_s - time.monotonic()
            seconds = HOST_S if host is hosts[-1] else min(HOST_S, longest_wait_s(left_s))
            sent, boot_id = asyncio.Event(), self.driver.view.of(host.name).boot_id
            body = replace(self.body, standing=suspicion.standing)
            try:
                answer = await host_calls.post(http, host, "/count", body, timeout=seconds, sent=sent.set)
                return CountAnswer.received(answer, host.name).prompt_tokens
            except DisaggError as error:
                if isinstance(error, RequestError) and not isinstance(error, KVMemoryExceeded):
                    raise
                self.failure = error
            if sent.is_set() and broke_off(self.failure):
                await suspicion.broke_off([(host, boot_id)], self.failure)
                await suspicion.take_turn(bool)
        raise self.failure or CapabilityMissing(
            f"no host of {self.body.model} counts tokens: whole-request hosts have no call for it", "send the request"
        )
